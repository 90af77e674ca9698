"""``hdfs://``: Hadoop's file system, through hdfs-native (a Rust client, no JVM), with WebHDFS for
the features it lacks."""
