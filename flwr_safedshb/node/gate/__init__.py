"""A reverse proxy between nodes and a SuperLink, which checks every call."""
