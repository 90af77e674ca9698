"""``hdfs://``: Hadoop's file system, on hdfs-native (a client in Rust, no JVM) and WebHDFS for what
that lacks."""
