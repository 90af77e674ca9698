"""Real servers for tests, each started, watched and stopped by its process id."""
