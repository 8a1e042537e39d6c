"""How actors live and talk: mailboxes with credits, resending links, supervision, the compute thread. Knows no request."""
