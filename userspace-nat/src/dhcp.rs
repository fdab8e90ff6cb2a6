//! DHCP server.
