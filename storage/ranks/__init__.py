"""The ranks of a job: how their calls find each other, and rounds in which they agree."""
