"""What a federation needs: fewer rounds, unequal nodes, a mean of models."""
