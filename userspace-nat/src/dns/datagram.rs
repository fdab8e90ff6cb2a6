//! Queries and replies as IPv4 packets of a guest.
use std::net::SocketAddrV4;

use slipgate_abi::DropReason;

use super::{Origin, Proxy, Reply, resolvers::DNS_PORT};
use crate::{
    datagram::{Datagram, is_unicast},
    poll::Poller,
    vm::VmNet,
};

impl Proxy {
    /// Processes a guest's IPv4 packet to port 53, as [`Proxy::query`] does for a message.
    ///
    /// # Errors
    /// The drop reason to count if there will be no reply.
    pub fn query_packet(
        &mut self,
        vm: &VmNet,
        packet: &[u8],
        poller: &Poller,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let datagram = Datagram::parse(packet).ok_or(DropReason::Malformed)?;
        if *datagram.from.ip() != vm.guest {
            return Err(DropReason::Spoofed);
        }
        if datagram.to.port() != DNS_PORT || datagram.from.port() == 0 {
            return Err(DropReason::ServiceReject);
        }
        if !is_unicast(*datagram.to.ip()) {
            return Err(DropReason::Group);
        }
        let origin = Origin::Udp {
            guest_port: datagram.from.port(),
            server: *datagram.to.ip(),
        };
        self.query(vm, origin, datagram.payload, poller, now_ns)
    }
}

impl Reply {
    /// The reply as an IPv4 packet to the guest; `None` if the query came over TCP.
    pub fn to_packet(&self, vm: &VmNet) -> Option<Vec<u8>> {
        let Origin::Udp { guest_port, server } = self.origin else {
            return None;
        };
        let datagram = Datagram {
            from: SocketAddrV4::new(server, DNS_PORT),
            to: SocketAddrV4::new(vm.guest, guest_port),
            payload: &self.message,
        };
        Some(datagram.emit())
    }
}
