//! Addresses of IPv6 in the private world, and of its guests.

use std::net::Ipv6Addr;

/// The world's router address on the uplink.
pub const ROUTER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
/// The host's address on the uplink, unless the world's configuration has another.
pub const HOST6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 2);
/// The first server address.
pub const SERVER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 0x10);
/// The second server address.
pub const SERVER6_2: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 0x20);

/// A guest's own address, of the prefix that guests have by default.
pub const GUEST6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 0x15);
/// The gateway of guests by default, which answers DNS too.
pub const GATEWAY6: Ipv6Addr = Ipv6Addr::new(0xfd73, 0x6c69, 0x7067, 0, 0, 0, 0, 1);
