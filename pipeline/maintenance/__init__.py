"""Work that an operator starts or a schedule repeats: rebuild, recover, republish, retention, capacity plan."""
