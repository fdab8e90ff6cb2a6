//! Where a TCP session's segments go.
use std::rc::Rc;

use slipgate_abi::{Command, Ip4, PortHeader};

use crate::{
    datapath::Datapath,
    inspection::{
        HostName,
        sessions::{Inspection, Kind},
        tcp::{Segment, Session, Wire, build_header},
    },
    name_gate::LearntName,
    packet_path::inspected::naming::{Naming, destination},
    port::{ETHERTYPE_IPV4, Outbox, VirtioNetHdr},
    state::{Core, VmState},
    vm::VmNet,
};

pub(crate) type May<'a> = dyn FnMut(&HostName, &mut Vec<Rc<LearntName>>) -> bool + 'a;

impl<D: Datapath> Core<D> {
    /// Has a TCP session do something; `None`: it is another's.
    pub(crate) fn with_session<T>(
        &mut self,
        vm: &VmState,
        slot: u32,
        now_ns: u64,
        inspection: &mut Inspection,
        work: impl FnOnce(&mut Session, &mut dyn Wire, &mut May<'_>) -> T,
    ) -> Option<T> {
        let Kind::Tcp(session) = &mut inspection.kind else {
            return None;
        };
        let tuple = self.datapath.slot(slot).guest_tuple();
        let mut by = Naming::new(&self.judge, vm.net.id, destination(&tuple), now_ns);
        let mut may = |said: &HostName, named: &mut Vec<Rc<LearntName>>| by.may(said, named);
        let mut wire = Ends {
            out: &mut self.out,
            packet: &mut self.scratch,
            vm: &vm.net,
            guest: (tuple.local, tuple.local_port),
            server: (tuple.remote, tuple.remote_port),
            sent_to_server: 0,
        };
        let done = work(session, &mut wire, &mut may);
        if let Some(name) = by.last {
            self.opened_by.insert(slot, (inspection.generation, name));
        }
        Some(done)
    }
}

/// Both ends of a connection.
struct Ends<'a> {
    out: &'a mut Outbox,
    packet: &'a mut Vec<u8>,
    vm: &'a VmNet,
    guest: (Ip4, u16),
    server: (Ip4, u16),
    sent_to_server: usize,
}

impl Ends<'_> {
    fn push_to_server(&mut self) {
        let header = PortHeader {
            code: Command::Forward as u8,
            flags: 0,
            vm_row: self.vm.row,
            id: self.vm.id,
        };
        let vnet = VirtioNetHdr::default();
        let _ = self.out.push(header, ETHERTYPE_IPV4, vnet, self.packet);
        self.sent_to_server += 1;
    }
}

// A full outbox loses a segment like a link would; the timers and the guest send again.
impl Wire for Ends<'_> {
    fn to_server(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.guest, self.server);
        self.push_to_server();
    }

    fn syn_to_server(&mut self, header: &[u8]) {
        build_header(self.packet, self.guest.0, self.server.0, header);
        self.push_to_server();
    }

    fn to_guest(&mut self, segment: &Segment<'_>) {
        segment.build(self.packet, self.server, self.guest);
        let vnet = VirtioNetHdr::default();
        let _ = self
            .out
            .to_guest(self.vm, ETHERTYPE_IPV4, vnet, self.packet);
    }

    fn sent_to_server(&self) -> usize {
        self.sent_to_server
    }
}
