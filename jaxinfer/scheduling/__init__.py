"""Which requests the next launch holds: requests, groups, queue, scheduler, pages."""
