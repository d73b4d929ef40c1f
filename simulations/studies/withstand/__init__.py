"""Which federations withstand colluders, measured against what the plan predicts."""
