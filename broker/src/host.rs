//! Facts about this host that matter to a NAT which bypasses the host's own routing and firewall:
//! its settings, resolvers, devices and sockets.
mod bound_ports;
pub mod hybrid;
pub mod kvm;
mod listening_socket;
mod offloads;
mod resolvers;
mod tuples;
mod user_dir;

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use slipgate_control::{host::HostFacts, netlink::Link};

pub(crate) use self::{
    bound_ports::bound,
    listening_socket::ListeningSocket,
    resolvers::{HostResolvers, RESOLV_CONF},
    tuples::{check as check_tuples, of_all, refused, shared},
    user_dir::{MEMORY_OF_ROOT, check_private, make_private},
};
pub use self::{offloads::offers_tso, tuples::GuestsAt, user_dir::user_mode_dir};

/// Time limit for the kernel's report that no socket listens on this host.
const LISTENS_WITHIN: Duration = Duration::from_millis(20);

/// Returns warnings for the operator, in sentences, to be shown before traffic passes.
pub fn warnings(facts: &HostFacts) -> Vec<String> {
    let mut warnings = facts.bypassed();
    if facts.ip_forward == Some(true) {
        warnings.push(
            "net.ipv4.ip_forward is on: slipgate turns forwarding off on its TAPs and its engine \
             port, so that nothing leaves untranslated"
                .into(),
        );
    }
    warnings
}

/// Returns why guests' IPv6 downloads by a device would break, with the remedy, in a sentence; `None`:
/// they do not. Joined to more than 64 KiB ("BIG TCP"), a packet of IPv6 has a hop-by-hop header of the
/// kernel's own (RFC 2675), behind which the programs do not look: the host would get it, and reset
/// the connection.
pub fn big_tcp_problem(link: &Link) -> Option<String> {
    /// Largest packet whose length the IPv6 header can give (`GSO_LEGACY_MAX_SIZE`), bytes.
    const ORDINARY: u32 = 65_536;
    let size = link.gro_max_size.filter(|size| *size > ORDINARY)?;
    let name = &link.name;
    Some(format!(
        "{name} joins arriving IPv6 segments to as many as {size} bytes (BIG TCP), and such packets do \
         not reach guests, whose downloads are reset; run: ip link set dev {name} gro_max_size \
         {ORDINARY}"
    ))
}

/// Returns which VMMs can open these TAPs, in sentences: one of those with several queues, and one
/// of the others. Devices that are no TAPs are left out.
pub fn tap_hints<'a>(links: impl Iterator<Item = &'a Link>) -> Vec<String> {
    /// Most names in a sentence.
    const SHOWN: usize = 8;
    let (mut one, mut many) = (Vec::new(), Vec::new());
    for link in links {
        match link.is_multi_queue_tap {
            Some(true) => many.push(&*link.name),
            Some(false) => one.push(&*link.name),
            None => {}
        }
    }
    let hint = |names: Vec<&str>, what: &str| {
        let (shown, more) = names.split_at(names.len().min(SHOWN));
        let more = match more.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!names.is_empty()).then(|| format!("{}{more}: {what}", shown.join(", ")))
    };
    let hints = [
        hint(
            many,
            "made with multi_queue; Firecracker refuses such a TAP, and so does Cloud Hypervisor \
             with one queue pair",
        ),
        hint(
            one,
            "made for one queue; a VMM with several queue pairs needs a TAP with multi_queue",
        ),
    ];
    hints.into_iter().flatten().collect()
}

/// Returns why a resolver can't be reached from this network namespace, as far as that is known
/// without sending a question; `None` if no reason is known.
pub fn resolver_problem(resolver: SocketAddr) -> Option<String> {
    let reach = || -> io::Result<()> {
        let socket = match resolver {
            SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?,
            SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?,
        };
        socket.connect(resolver)?;
        if resolver.ip().is_loopback() {
            // Nothing that wants an answer: where nobody listens the kernel says so at once.
            socket.send(&[])?;
            socket.set_read_timeout(Some(LISTENS_WITHIN))?;
            match socket.recv(&mut [0; 1]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                other => drop(other?),
            }
        }
        Ok(())
    };
    match reach() {
        Ok(()) => None,
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Some(format!(
            "nobody listens at {resolver} in this network namespace"
        )),
        Err(e) => Some(format!("{resolver} can't be reached ({e})")),
    }
}

#[cfg(test)]
#[path = "host_test.rs"]
mod tests;
