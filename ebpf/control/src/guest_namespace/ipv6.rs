//! IPv6 in a command's namespace, ready before the command begins.
//!
//! Nobody else is on the link, so no address is probed (duplicate address detection), and no
//! advertisement is waited for: address and route are set.
use std::{io, net::Ipv6Addr};

use crate::{
    Error, Result,
    device::{Device, request},
};

/// Length of the prefix, bits.
const PREFIX_LEN: u32 = 64;
/// Metric of a route that is given none (`IP6_RT_PRIO_USER`, <linux/ipv6_route.h>).
const METRIC: u32 = 1_024;

/// `struct in6_rtmsg` of <linux/ipv6_route.h>.
#[repr(C)]
struct Route {
    destination: libc::in6_addr,
    source: libc::in6_addr,
    gateway: libc::in6_addr,
    kind: u32,
    destination_len: u16,
    source_len: u16,
    metric: u32,
    info: libc::c_ulong,
    flags: u32,
    ifindex: libc::c_int,
}

/// IPv6 addresses of the namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceIpv6 {
    /// Address of the TAP, of a /64.
    pub guest: Ipv6Addr,
    /// Address of the router, slipgate's.
    pub gateway: Ipv6Addr,
}

impl NamespaceIpv6 {
    /// Has the device use these addresses. It is up, after [`begin`].
    pub(super) fn set(&self, device: &Device) -> Result<()> {
        let ifindex = device.ifindex()?.get() as libc::c_int;
        let mut address = libc::in6_ifreq {
            ifr6_addr: in6(self.guest),
            ifr6_prefixlen: PREFIX_LEN,
            ifr6_ifindex: ifindex,
        };
        // SAFETY: the request with its struct.
        let set = unsafe { request(libc::AF_INET6, libc::SIOCSIFADDR, &raw mut address) };
        set.map_err(Error::os(format!(
            "set the address {}/{PREFIX_LEN} of the interface {}",
            self.guest,
            device.name()
        )))?;
        let mut route = Route {
            destination: in6(Ipv6Addr::UNSPECIFIED),
            source: in6(Ipv6Addr::UNSPECIFIED),
            gateway: in6(self.gateway),
            kind: 0,
            destination_len: 0,
            source_len: 0,
            metric: METRIC,
            info: 0,
            flags: u32::from(libc::RTF_UP | libc::RTF_GATEWAY),
            ifindex,
        };
        // SAFETY: the request with its struct.
        let added = unsafe { request(libc::AF_INET6, libc::SIOCADDRT, &raw mut route) };
        added.map_err(Error::os(format!(
            "add the IPv6 default route by {}",
            self.gateway
        )))
    }
}

/// Has a device, which is down, use IPv6 with what it is told and nothing else.
pub(super) fn begin(device: &Device) -> Result<()> {
    if !device.has_ipv6() {
        return Err(Error::os("use IPv6 (--ipv6)")(
            io::Error::from_raw_os_error(libc::EAFNOSUPPORT),
        ));
    }
    for key in ["accept_ra", "autoconf", "accept_dad", "dad_transmits"] {
        device.write_sysctl("ipv6", key, false)?;
    }
    device.write_sysctl("ipv6", "disable_ipv6", false)
}

fn in6(address: Ipv6Addr) -> libc::in6_addr {
    libc::in6_addr {
        s6_addr: address.octets(),
    }
}
