"""The real vLLM as a client of our checkpoints, on a CPU: ``make test-engines``. Without it nothing is collected."""
