"""Moving bytes: plan, coalesce, engine, and one executor per way of moving them."""
