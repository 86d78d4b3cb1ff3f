"""The folder that a conversion makes: held by a lock, filled shard by shard, with a card and a picture."""
