"""The processes of a server: what their parent and they say to each other, and how they are kept alive."""
