"""Adapters trained by PEFT on real tasks, merged by covmerge and by PEFT, and put to the test."""
