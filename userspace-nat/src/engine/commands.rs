//! Doing what the broker says.
use std::sync::atomic::Ordering::Relaxed;

use slipgate_abi::Verdict;

use super::{
    Context, Control, ControlMessage, ControlReply, Engine, EngineError, Services, core::Core,
};
use crate::{
    clock::Clock,
    datapath::Datapath,
    flow::{EndReason, Flows},
    port::FrameIo,
    route::{Route, RouteSnapshot, RouteTable},
    vm::VmNet,
};

impl<D: Datapath, P: FrameIo, C: Clock, K: Control, S: Services> Engine<D, P, C, K, S> {
    pub(super) fn read_control(&mut self) -> Result<(), EngineError> {
        while let Some(message) = self.control.recv().map_err(EngineError::Control)? {
            let now_ns = self.clock.now_ns();
            self.apply(message, now_ns)?;
        }
        Ok(())
    }

    pub(super) fn apply(
        &mut self,
        message: ControlMessage,
        now_ns: u64,
    ) -> Result<(), EngineError> {
        match message {
            ControlMessage::Vm(spec) => {
                let stats = self.core.datapath.stats(spec.row);
                let vm = VmNet::new(spec, stats);
                self.services.vm_added(&vm);
                self.core.set_vm(vm);
            }
            ControlMessage::VmGone { row, id } => {
                self.end_where(EndReason::VmRemoved, now_ns, |flows| {
                    flows.slots_of(row).to_vec()
                });
                // Its records need its name.
                self.finish_all_due();
                if self.core.remove_vm(row, id) {
                    let cx = &mut Context {
                        now_ns,
                        out: &mut self.core.out,
                        poller: &self.poller,
                    };
                    self.services.vm_removed(id, cx);
                }
            }
            ControlMessage::Routes {
                routes,
                local,
                links,
            } => {
                self.core.policy.set_local(&local);
                self.core.set_links(&links);
                self.core.set_routes(&routes, now_ns);
            }
            ControlMessage::Forwards(forwards) => self.core.set_forwards(forwards),
            ControlMessage::RelayForward(forward) => {
                let cx = &mut Context {
                    now_ns,
                    out: &mut self.core.out,
                    poller: &self.poller,
                };
                // Only the epoll set can refuse it: the engine is out of memory.
                self.services
                    .add_forward(forward, cx)
                    .map_err(EngineError::Wait)?;
            }
            ControlMessage::Resolvers(resolvers) => self.services.set_resolvers(&resolvers),
            ControlMessage::ReservedPorts(ports) => self.core.flows.ports.set_reserved(ports),
            ControlMessage::FlowLog(writer) => self.log.set_writer(writer),
            ControlMessage::Why { request, row, to } => {
                let answer = self.core.why(row, to);
                self.answer(ControlReply::Why { request, answer })?;
            }
            ControlMessage::Sync { request } => {
                self.write_out();
                let status = self.status();
                self.answer(ControlReply::Synced { request, status })?;
            }
            ControlMessage::Shutdown(on_exit) => self.exit = Some(on_exit),
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
        for slot in which(&self.core.flows) {
            self.core
                .flows
                .unlink(&mut self.core.datapath, slot, reason, now_ns);
        }
    }

    /// Ends and records every flow; the port is not read meanwhile.
    pub(super) fn end_all(&mut self) {
        let now_ns = self.clock.now_ns();
        self.end_where(EndReason::Detached, now_ns, Flows::all);
        self.finish_all_due();
        self.write_out();
    }

    /// Waits out every grace that has begun: at most [`slipgate_abi::timeout::CLOSING_GRACE_NS`].
    fn finish_all_due(&mut self) {
        let mut ended = Vec::new();
        while let Some(due_ns) = self.core.flows.next_due_ns() {
            let left_ns = due_ns.saturating_sub(self.clock.now_ns());
            self.clock.sleep_ns(left_ns);
            let Core {
                flows, datapath, ..
            } = &mut self.core;
            flows.finish_due(datapath, self.clock.now_ns(), &mut |e| ended.push(*e));
        }
        self.record(&ended);
    }
}

impl<D: Datapath> Core<D> {
    /// New routes: flows follow to a new next hop; those whose translated address is gone end.
    fn set_routes(&mut self, routes: &RouteSnapshot, now_ns: u64) {
        self.routes = RouteTable::new(routes);
        for slot in self.flows.all() {
            let live = self.datapath.slot(slot);
            if live.verdict().load(Relaxed) == Verdict::Closing as u32 {
                continue;
            }
            if !self.routes.is_host(live.nat().into()) {
                self.flows
                    .unlink(&mut self.datapath, slot, EndReason::AddressGone, now_ns);
                continue;
            }
            if let Route::Via {
                ifindex,
                next_hop,
                source,
            } = self.routes.lookup(live.remote().into())
                && live.nat() == source.into()
            {
                let next_hop = self.next_hop(ifindex, next_hop.into());
                live.next_hop().store(next_hop, Relaxed);
            }
        }
    }
}
