"""The ranks of a job: how their calls find each other, and their rounds of agreement."""
