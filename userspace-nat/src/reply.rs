//! RST and ICMP errors to the guest.
