"""The ranks of a job: their calls, which find each other, and their rounds of agreement."""
