"""An attack on a server of its own: hostile requests, floods, strangers, drains and kills, beside honest clients who must not notice."""
