"""What the node needs of Flower's private names, and patches of its SuperNode."""
