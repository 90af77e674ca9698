"""Where the options of a driver come from: the environment, a file, and whether that file is
trusted."""
