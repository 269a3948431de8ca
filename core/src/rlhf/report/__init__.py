"""What a run folder shows about its run: the page of `rlhf report` and the model card."""
