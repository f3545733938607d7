"""Floor 3: the front of Weir. Speaks HTTP and gRPC with clients and sends each prompt through its two workers."""
