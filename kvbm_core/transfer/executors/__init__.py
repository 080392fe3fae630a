"""One Executor per way of moving bytes."""
