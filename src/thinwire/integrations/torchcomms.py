"""Module that torchcomms imports by an entry point when asked for the backend ``thinwire``, which it does not have."""

from thinwire.integrations.group_options import refuse_torchcomms

refuse_torchcomms()
