"""What torchcomms imports, by an entry point, when it is asked for a group of backend ``thinwire``: it has none."""

from thinwire.integrations.group_options import refuse_torchcomms

refuse_torchcomms()
