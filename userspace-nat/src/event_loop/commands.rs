//! Commands of the broker, as methods of the engine.
use std::{
    io::{Read, Seek, Write},
    net::SocketAddr,
    ops::RangeInclusive,
    sync::atomic::Ordering::{Acquire, Release},
};

use slipgate_abi::{
    DropReason, Protocol, RuleIndex, SlotIndex, VmId, VmRow, timeout::CLOSING_GRACE_NS, vm::VmFlags,
};
use slipgate_model::{NetworkView, OnExit, OpenQuestion, Subject, VmSpec, WhyAnswer};
use slipgate_policy::{Destination, OnReload};

use crate::{
    admission::{
        plan::Planner,
        rejudge::{kept_apart, not_let_in},
    },
    clock::Clock,
    control::{Control, EndsToken, Forward, ForwardChange, why::why},
    datapath::Datapath,
    dns::Origin,
    event_loop::{Engine, EngineError, cut::MOST_PROBES},
    flow::{EndReason, Flows},
    observe::{CaptureRequest, NotCaptured, PortDump},
    packet_path::Disposition,
    poll::Context,
    port::FrameIo,
    record::Output,
    relay,
    route::{RouteTable, ask::AskKernel},
    state::{Core, Nat},
    vm::VmNet,
};

impl<D: Datapath, P: FrameIo, C: Clock> Engine<D, P, C> {
    /// Adds a VM, or changes its description.
    pub fn set_vm(&mut self, spec: VmSpec) {
        self.adopt_vm(spec.row);
        let present = self.core.rules.judge.borrow().policy_of(spec.id);
        let spec = self.reloading.meanwhile(spec, present);
        self.replace_vm(spec, true);
    }

    /// Replaces a VM's description. `watch`: its policy is the same as before. Returns how many flows
    /// it cut.
    pub(super) fn replace_vm(&mut self, spec: VmSpec, watch: bool) -> usize {
        let (row, id) = (spec.row, spec.id);
        let stats = self.core.nat.datapath.stats(row);
        let vm = VmNet::new(spec, stats);
        let row6 = self.core.nat.datapath.vm6(row);
        self.services.relay.add_vm(vm.clone(), row6);
        self.core.advertise_ipv6_of(&vm, self.clock.now_ns());
        let before = self.core.vms.get(row).map(|vm| vm.net.ipv6);
        let ipv6 = vm.ipv6;
        let watched = vm.clone();
        let moved = self.core.set_vm(vm);
        self.watch_activity(&watched);
        let mut cut = 0;
        if before.is_some_and(|before| before != ipv6) {
            let left = self.core.flows_of_other_prefix(row);
            cut += self.cut_slots(&left, EndReason::Prefix);
        }
        if moved.uplink {
            let left = self.core.nat.follow_uplink_of(row, id);
            cut += self.cut_slots(&left, EndReason::Uplink);
        }
        if moved.uplink && watch {
            let apart = kept_apart(&self.core, row, self.clock.now_ns());
            cut += self.cut_slots(&apart, EndReason::Policy);
        }
        // With another policy, its flows are judged again one by one.
        if moved.pool && watch && self.core.rules.judge.borrow().on_reload(id) == OnReload::Cut {
            let left = self.core.flows_off_pool(row);
            cut += self.cut_slots(&left, EndReason::NatAddresses);
        }
        cut
    }

    /// Removes a VM: its flows end.
    pub fn remove_vm(&mut self, row: VmRow, id: VmId) {
        self.adopt_vm(row);
        self.reloading.forget(id);
        let now_ns = self.clock.now_ns();
        self.end_where(EndReason::VmRemoved, now_ns, |flows| {
            flows.slots_of(row).to_vec()
        });
        self.activity.forget(id);
        if self.core.remove_vm(row, id) {
            let cx = &mut Context::new(now_ns, &mut self.core.out.queue, &self.poller);
            self.services.vm_removed(id, cx);
            self.record_refusals();
            self.core.journal.refusals.forget(id);
        }
    }

    /// Replaces the routes, links and local addresses of the host.
    pub fn set_network(&mut self, network: &NetworkView) {
        self.core.rules.judge.borrow_mut().set_local(&network.local);
        let Nat {
            flows,
            network: known,
            ..
        } = &mut self.core.nat;
        known.following.probes = MOST_PROBES;
        known.set_links(&network.links, flows);
        known.set_routes(RouteTable::new(&network.routes), flows);
    }

    /// Replaces the forwards that the kernel translates.
    pub fn set_forwards(&mut self, forwards: Vec<Forward>) {
        self.core.forwards.set(forwards);
    }

    /// Adds a bound socket of the host whose connections are relayed to a guest.
    ///
    /// # Errors
    /// When the epoll set does not take the socket: the engine is out of memory.
    pub fn add_relay_forward(&mut self, forward: relay::Forward) -> Result<(), EngineError> {
        let now_ns = self.clock.now_ns();
        let cx = &mut Context::new(now_ns, &mut self.core.out.queue, &self.poller);
        self.services
            .relay
            .add_forward(forward, cx)
            .map_err(EngineError::Wait)
    }

    /// Tells that a VM is a network namespace of this host, in which connections of its forwards may be
    /// continued by these sockets.
    pub fn set_namespace(&mut self, vm: VmId, sockets: relay::NamespaceSockets) {
        self.services.relay.set_namespace(vm, sockets);
    }

    /// Changes the forwards of a VM. Flows through a removed one are cut, unless the VM's policy
    /// says of a reload that they are kept.
    ///
    /// # Errors
    /// As [`Engine::add_relay_forward`].
    pub fn change_forwards(&mut self, change: ForwardChange) -> Result<(), EngineError> {
        let ForwardChange {
            vm,
            row,
            removed,
            added,
        } = change;
        self.adopt_vm(row);
        let keeps = self.core.rules.judge.borrow().on_reload(vm) == OnReload::Keep;
        let cx = &mut Context::new(self.clock.now_ns(), &mut self.core.out.queue, &self.poller);
        for (protocol, host) in removed {
            self.core.forwards.remove(vm, protocol, host);
            self.services.relay.close_forward(vm, protocol, host, cx);
            // A UDP client's answers need the socket.
            if !keeps || protocol == Protocol::Udp {
                self.services.relay.cut_forward(vm, protocol, host, cx);
            }
        }
        for (translated, relayed) in added {
            self.core.forwards.add(translated);
            relayed.map_or(Ok(()), |relayed| self.add_relay_forward(relayed))?;
        }
        if !keeps {
            let closed = not_let_in(&self.core, row, self.clock.now_ns());
            self.cut_slots(&closed, EndReason::Policy);
        }
        Ok(())
    }

    /// Replaces the host's resolvers, for policies that configure none of their own.
    pub fn set_resolvers(&mut self, resolvers: &[SocketAddr]) {
        self.services.dns.set_resolvers(resolvers);
    }

    /// Replaces the set of translated ports that sockets of the host have bound.
    pub fn set_reserved_ports(&mut self, ports: Vec<(Protocol, u16)>) {
        let flows = &mut self.core.nat.flows;
        flows.mappings.set_reserved(ports.iter().copied());
        flows.ports.set_reserved(ports);
    }

    /// Sets whom to ask about rules of the host that the engine can't judge. Nobody is asked without
    /// it, and flows that come to such a rule are refused.
    pub fn set_route_kernel(&mut self, kernel: Box<dyn AskKernel>) {
        self.core.nat.network.set_kernel(kernel);
    }

    /// Sets the range of ports for endpoint-independent mappings, before flows are adopted and after
    /// [`Engine::set_world_of_sockets`].
    pub fn set_eim_ports(&mut self, range: Option<RangeInclusive<u16>>) {
        if let Some(host) = &self.core.nat.host_sockets {
            host.shared.set_range(range.as_ref());
        }
        self.core.nat.flows.mappings.set_range(range);
    }

    /// Packets from the world are made of what sockets of the host received (user mode): those of
    /// IPv6 that the guest's link does not take leave in fragments, too. Flows that the host has no
    /// socket for are refused.
    pub fn set_world_of_sockets(&mut self) {
        self.core.nat.world_is_sockets = true;
        self.core.nat.host_sockets = self.port.host_sockets();
    }

    /// Replaces the flow log's file (rotation).
    pub fn set_flow_log(&mut self, file: impl Read + Write + Seek + Send + 'static) {
        self.log.set_file(file);
    }

    /// Writes the port's frames to this output (`--pcap`).
    pub fn set_pcap(&mut self, output: Output) {
        self.watch.dump = Some(PortDump::new(output));
    }

    /// Replaces the file of the port's frames (rotation).
    pub fn set_pcap_file(&mut self, file: Box<dyn Write + Send>) {
        match &mut self.watch.dump {
            Some(dump) => dump.set_file(file),
            None => self.set_pcap(Output::direct(file)),
        }
    }

    /// Returns which rule decides about a destination, and the outcome for a flow to it. The
    /// destination's address is 0.0.0.0 when only a name is known; `name`: the name that the guest
    /// would resolve first.
    pub fn why(&mut self, row: VmRow, to: Destination, name: Option<&str>) -> WhyAnswer {
        if let Some(vm) = self.core.vms.get_mut(row) {
            vm.loopback_flows = self.services.relay.loopback_flows(vm.net.id);
        }
        let core = &self.core;
        let now_ns = self.clock.now_ns();
        let rules = (&core.rules, &core.forwards);
        let planner = Planner::new(&core.nat, rules, &core.inspected, now_ns);
        why(&planner, &core.vms, row, to, name)
    }

    /// Starts a capture that writes packets to a socket.
    ///
    /// # Errors
    /// When the flow or VM is not here, or one capture more is too many.
    pub fn capture(&mut self, request: CaptureRequest) -> Result<(), NotCaptured> {
        match request.subject {
            Subject::Flow { slot, .. } => self.adopt_flow(slot),
            Subject::Vm { row } => self.adopt_vm(row),
            Subject::Relayed(_) => {}
        }
        let Core { nat, vms, .. } = &mut self.core;
        let now_ns = self.clock.now_ns();
        let captures = &mut self.watch.captures;
        captures.begin(nat, vms, &self.poller, request, now_ns)
    }

    /// Restarts the timers of a frozen VM's flows, just before it is thawed.
    pub fn thaw(&mut self, row: VmRow) {
        self.adopt_vm(row);
        let now_ns = self.clock.now_ns();
        let Nat {
            flows, datapath, ..
        } = &self.core.nat;
        flows.begin_timers(datapath, row, now_ns);
        if let Some(vm) = self.core.vms.id_of(row) {
            self.core.inspected.begin_timers(vm, now_ns);
        }
    }

    /// Holds what comes for a VM from now on, as its guest is paused.
    pub fn sleep(&mut self, row: VmRow) {
        let Some(id) = self.core.vms.id_of(row) else {
            return;
        };
        self.core.sleeping.add(row, id, true);
        if let Some(vm) = self.core.nat.datapath.vm(row) {
            vm.flags().fetch_or(VmFlags::ASLEEP, Release);
        }
    }

    /// Delivers what was held for a VM, whose guest runs again, and what came meanwhile. Returns
    /// `false`, and changes nothing, if its TAP is not there.
    pub fn wake(&mut self, row: VmRow) -> bool {
        let Some(vm) = self.core.nat.datapath.vm(row) else {
            return false;
        };
        if vm.flags().load(Acquire) & VmFlags::ASLEEP == 0 {
            return true;
        }
        if vm.tap_ifindex().load(Acquire) == 0 {
            return false;
        }
        self.thaw(row);
        let now_ns = self.clock.now_ns();
        for mut frame in self.core.sleeping.wake(row) {
            let (services, poller) = (&mut self.services, &self.poller);
            let disposition = self.core.handle_taken(&mut frame, services, poller, now_ns);
            if disposition == Disposition::Send {
                self.write(&frame);
            }
            self.write_answers();
        }
        // What goes by the kernel's path must not overtake what was handed over since. What is handed over
        // between the last look and this is sent on when it is read.
        self.read_port_until_empty();
        vm.flags().fetch_and(!VmFlags::ASLEEP, Release);
        self.record_starts();
        true
    }

    /// Counts what is held for VMs that sleep as dropped: the engine stops.
    pub(super) fn drop_all_held(&mut self) {
        for row in self.core.sleeping.rows() {
            for frame in self.core.sleeping.forget(row) {
                self.core.drop_held(row, &frame, DropReason::EngineBusy);
            }
        }
    }

    /// Stops the engine at the end of the turn, with this treatment of its flows.
    pub fn stop(&mut self, on_exit: OnExit) {
        self.exit = Some(on_exit);
    }

    /// The guests' questions by UDP that have no reply yet, for a successor.
    pub fn open_questions(&self) -> impl Iterator<Item = OpenQuestion> {
        self.services.dns.open_questions()
    }

    /// Asks the questions that a predecessor left without a reply.
    pub fn ask_again(&mut self, questions: Vec<OpenQuestion>) {
        let now_ns = self.clock.now_ns();
        for question in questions {
            let Some(vm) = self.core.vms.by_id(question.vm) else {
                continue;
            };
            let origin = Origin::Udp {
                guest: SocketAddr::new(
                    question.guest.unwrap_or(vm.net.guest.into()),
                    question.guest_port,
                ),
                server: question.server,
            };
            let message = &question.message;
            let dns = &mut self.services.dns;
            // One that is refused the guest asks again.
            let guest = self.core.nat.network.guest(&vm.net);
            let _ = dns.query(guest, origin, message, &self.poller, now_ns);
        }
    }

    /// Sets the texts of the forwards, for the flow log. `first`: the element of `RULES` of the first.
    pub fn set_forward_texts(&mut self, first: RuleIndex, texts: Vec<String>) {
        self.core.rules.texts.set_forwards(first, texts);
    }

    /// Returns a token for all flows that have begun to end by now. [`Control::ended`] is called
    /// with it once they have ended and their records, and all earlier ones, are written.
    pub fn after_ends(&mut self) -> EndsToken {
        let now_ns = self.clock.now_ns();
        let due_ns = match self.core.nat.flows.next_due_ns() {
            Some(_) => now_ns + CLOSING_GRACE_NS,
            None => now_ns,
        };
        let token = EndsToken(self.next_token);
        self.next_token += 1;
        self.ending.push_back((due_ns, token));
        token
    }

    /// Reports the tokens whose flows have ended. All frames and records were written before.
    pub(crate) fn report_ended(
        &mut self,
        control: &mut impl Control<Self>,
        now_ns: u64,
    ) -> Result<(), EngineError> {
        // Flows that are due may be left for the next turn.
        let next_due_ns = self.core.nat.flows.next_due_ns().unwrap_or(u64::MAX);
        let has_ended =
            |(due_ns, _): &mut (u64, EndsToken)| *due_ns <= now_ns && *due_ns < next_due_ns;
        while let Some((_, token)) = self.ending.pop_front_if(has_ended) {
            control.ended(token).map_err(EngineError::Control)?;
        }
        Ok(())
    }

    fn end_where(
        &mut self,
        reason: EndReason,
        now_ns: u64,
        which: impl FnOnce(&Flows) -> Vec<SlotIndex>,
    ) {
        for slot in which(&self.core.nat.flows) {
            self.core
                .nat
                .flows
                .unlink(&mut self.core.nat.datapath, slot, reason, now_ns);
        }
    }

    /// Ends and records every flow; the port is not read meanwhile.
    pub(crate) fn end_all(&mut self) {
        let now_ns = self.clock.now_ns();
        self.end_where(EndReason::Detached, now_ns, Flows::all);
        self.finish_all_due();
        self.write_out();
        self.finish_log();
        self.free_recorded(now_ns);
    }

    /// Waits until every grace that has begun is over: at most [`CLOSING_GRACE_NS`].
    fn finish_all_due(&mut self) {
        let mut ended = Vec::new();
        while let Some(due_ns) = self.core.nat.flows.next_due_ns() {
            let left_ns = due_ns.saturating_sub(self.clock.now_ns());
            self.clock.sleep_ns(left_ns);
            let Nat {
                flows, datapath, ..
            } = &mut self.core.nat;
            let judge = self.core.rules.judge.borrow();
            let (timers, now_ns) = (|vm| judge.timers(vm), self.clock.now_ns());
            flows.finish_due(datapath, timers, now_ns, &mut |e| ended.push(*e));
        }
        self.record(&ended);
    }
}
