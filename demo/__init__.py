"""Fine-tune experts of one small pretrained encoder on this machine, merge and compare them."""
