//! IPv6 in a command's namespace, ready before the command begins.
//!
//! Nobody else is on the link, so no address is probed (duplicate address detection), and no
//! advertisement is waited for: address and route are set.
//!
//! The kernel shows a new address at once, but adds the route by which it knows packets for it as its
//! own later, in a queue of work that is shared with all namespaces. Answers that come before are lost,
//! those of neighbours among them, and are asked for again after a second. So that route is waited for.
use std::{
    fs, io,
    net::Ipv6Addr,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Error, Result,
    device::{Device, request},
};

/// Length of the prefix, bits.
const PREFIX_LEN: u32 = 64;
/// Metric of a route that is given none (`IP6_RT_PRIO_USER`, <linux/ipv6_route.h>).
const METRIC: u32 = 1_024;

/// Routes of the calling thread's namespace.
const ROUTES: &str = "/proc/thread-self/net/ipv6_route";
/// Flag of a route to an address of the host's own (`RTF_LOCAL`, <linux/ipv6_route.h>).
const LOCAL: u32 = 0x8000_0000;
/// Longest wait for it. It takes some 50 ms on a host that makes other namespaces meanwhile.
const LOCAL_WITHIN: Duration = Duration::from_secs(3);

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
        )))?;
        self.await_local_route();
        Ok(())
    }

    /// Waits until the kernel takes packets for the address, for so long at most: a connection that
    /// begins before then takes a second longer, which is no reason to refuse the command. Nor is it
    /// that the routes can't be read.
    fn await_local_route(&self) {
        let end = Instant::now() + LOCAL_WITHIN;
        while let Ok(routes) = fs::read_to_string(ROUTES)
            && !is_local(&routes, self.guest)
            && Instant::now() < end
        {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether the routes have one to an address of the host's own. A line has the destination, its prefix
/// length, the source and its prefix length, the next hop, metric, users, uses, flags and device, each
/// number in hexadecimal.
fn is_local(routes: &str, address: Ipv6Addr) -> bool {
    let destination = format!("{:032x}", address.to_bits());
    routes.lines().any(|line| {
        let mut fields = line.split_whitespace();
        let is_to_it = fields.next() == Some(&destination) && fields.next() == Some("80");
        let flags = fields
            .nth(6)
            .and_then(|flags| u32::from_str_radix(flags, 16).ok());
        is_to_it && flags.is_some_and(|flags| flags & LOCAL != 0)
    })
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

#[cfg(test)]
#[path = "ipv6_test.rs"]
mod tests;
