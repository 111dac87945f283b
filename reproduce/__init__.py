"""What is promised: the command line and the pipeline stages, verify, resume, log, show, sample, plan."""

__version__ = "0.1.0"
