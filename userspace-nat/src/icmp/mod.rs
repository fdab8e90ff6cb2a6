//! ICMP: echo to the gateway, errors translated both ways.
