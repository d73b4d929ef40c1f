"""The privacy budget on disk."""
