//! Execution of the broker's messages.
use slipgate_abi::timeout::CLOSING_GRACE_NS;

use crate::{
    admission::plan::Planner,
    clock::Clock,
    control::{Control, ControlMessage, ControlReply, why::why},
    datapath::Datapath,
    event_loop::{Engine, EngineError},
    flow::{EndReason, Flows},
    observe::PortDump,
    poll::Context,
    port::FrameIo,
    record::Output,
    route::RouteTable,
    state::{Core, Nat},
    vm::VmNet,
};

/// An answer that waits until flows have ended.
#[derive(Debug)]
pub(crate) enum Later {
    /// Answer to a sync, with the engine's status at that time.
    Sync(u64),
    /// Answer that is complete already.
    Reply(ControlReply),
}

impl<D: Datapath, P: FrameIo, C: Clock, K: Control> Engine<D, P, C, K> {
    pub(crate) fn read_control(&mut self) -> Result<(), EngineError> {
        while let Some(message) = self.control.recv().map_err(EngineError::Control)? {
            let now_ns = self.clock.now_ns();
            self.apply(message, now_ns)?;
        }
        Ok(())
    }

    pub(crate) fn apply(
        &mut self,
        message: ControlMessage,
        now_ns: u64,
    ) -> Result<(), EngineError> {
        match message {
            ControlMessage::Vm(spec) => {
                let stats = self.core.nat.datapath.stats(spec.row);
                let vm = VmNet::new(spec, stats);
                self.services.relay.add_vm(vm.clone());
                self.core.set_vm(vm);
            }
            ControlMessage::VmGone { row, id } => {
                self.end_where(EndReason::VmRemoved, now_ns, |flows| {
                    flows.slots_of(row).to_vec()
                });
                if self.core.remove_vm(row, id) {
                    let cx = &mut Context::new(now_ns, &mut self.core.out.queue, &self.poller);
                    self.services.vm_removed(id, cx);
                    self.record_refusals();
                    self.core.journal.refusals.forget(id);
                }
            }
            ControlMessage::Routes {
                routes,
                local,
                links,
            } => {
                self.core.rules.judge.borrow_mut().set_local(&local);
                let Nat { flows, network, .. } = &mut self.core.nat;
                network.set_links(&links, flows);
                network.set_routes(RouteTable::new(&routes), flows);
            }
            ControlMessage::Forwards(forwards) => self.core.forwards.set(forwards),
            ControlMessage::ForwardTexts(texts) => self.core.rules.set_forward_texts(texts),
            ControlMessage::Policies(reload) => self.reload(*reload, now_ns),
            ControlMessage::RelayForward(forward) => {
                let cx = &mut Context::new(now_ns, &mut self.core.out.queue, &self.poller);
                // Only the epoll set can refuse it, when the engine is out of memory.
                self.services
                    .relay
                    .add_forward(forward, cx)
                    .map_err(EngineError::Wait)?;
            }
            ControlMessage::Resolvers(resolvers) => self.services.dns.set_resolvers(&resolvers),
            ControlMessage::ReservedPorts(ports) => self.core.nat.flows.ports.set_reserved(ports),
            ControlMessage::FlowLog(writer) => self.log.set_writer(writer),
            ControlMessage::Why {
                request,
                row,
                to,
                name,
            } => {
                if let Some(vm) = self.core.vms.get_mut(row) {
                    vm.loopback_flows = self.services.relay.loopback_flows(vm.net.id);
                }
                let core = &self.core;
                let planner = Planner::new(&core.nat, &core.rules, &core.inspected, now_ns);
                let answer = why(&planner, &core.vms, row, to, name.as_deref());
                self.answer(ControlReply::Why { request, answer })?;
            }
            ControlMessage::Names { request, from } => {
                let page = self.names_page(from, now_ns);
                self.answer(ControlReply::Names { request, page })?;
            }
            ControlMessage::Sync { request } => self.answer_after_ends(Later::Sync(request)),
            ControlMessage::PcapOutput(output) => self.watch.dump = Some(PortDump::new(output)),
            ControlMessage::Pcap(file) => match &mut self.watch.dump {
                Some(dump) => dump.set_file(file),
                None => self.watch.dump = Some(PortDump::new(Output::direct(file))),
            },
            ControlMessage::Cut { request, what } => {
                let flows = self.cut(what).map(|flows| flows as u64);
                let reply = ControlReply::Cut { request, flows };
                self.answer_after_ends(Later::Reply(reply));
            }
            ControlMessage::Capture { request, capture } => {
                let Core { nat, vms, .. } = &mut self.core;
                let captures = &mut self.watch.captures;
                let refused = captures
                    .begin(nat, vms, &self.poller, capture, now_ns)
                    .err();
                self.answer(ControlReply::Capturing { request, refused })?;
            }
            ControlMessage::Listen { request, row, to } => {
                let refused = self.listen(row, to).err();
                self.answer(ControlReply::Listening { request, refused })?;
            }
            ControlMessage::Thaw { request, row } => {
                self.core
                    .nat
                    .flows
                    .begin_timers(&self.core.nat.datapath, row, now_ns);
                if let Some(vm) = self.core.vms.get(row).map(|vm| vm.net.id) {
                    self.core.inspected.begin_timers(vm, now_ns);
                }
                self.answer(ControlReply::Thawed { request })?;
            }
            ControlMessage::Shutdown(on_exit) => self.exit = Some(on_exit),
        }
        Ok(())
    }

    /// Answers a request once every flow that has begun to end by now has ended.
    pub(crate) fn answer_after_ends(&mut self, what: Later) {
        let now_ns = self.clock.now_ns();
        let due_ns = match self.core.nat.flows.next_due_ns() {
            Some(_) => now_ns + CLOSING_GRACE_NS,
            None => now_ns,
        };
        self.later.push_back((due_ns, what));
    }

    /// Sends the answers that are due. All frames and records were written before.
    pub(crate) fn answer_later(&mut self, now_ns: u64) -> Result<(), EngineError> {
        while let Some((_, what)) = self.later.pop_front_if(|(due_ns, _)| *due_ns <= now_ns) {
            let reply = match what {
                Later::Sync(request) => ControlReply::Synced {
                    request,
                    status: self.status(),
                },
                Later::Reply(reply) => reply,
            };
            self.answer(reply)?;
        }
        Ok(())
    }

    fn answer(&mut self, reply: ControlReply) -> Result<(), EngineError> {
        self.control.send(reply).map_err(EngineError::Control)
    }

    fn end_where(
        &mut self,
        reason: EndReason,
        now_ns: u64,
        which: impl FnOnce(&Flows) -> Vec<u32>,
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
            flows.finish_due(datapath, self.clock.now_ns(), &mut |e| ended.push(*e));
        }
        self.record(&ended);
    }
}
