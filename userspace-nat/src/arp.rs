//! ARP for what the kernel did not answer.
