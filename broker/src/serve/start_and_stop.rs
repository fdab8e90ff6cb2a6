//! The steps from attached kernel state to a serving broker, and from there to its end.
use std::{
    io::Write as _,
    os::fd::{AsFd as _, BorrowedFd},
    time::Instant,
};

use anyhow::Context as _;
use slipgate_ipc::{client::ControlServer, engine::OnExit};

use super::{Broker, ENGINE_WITHIN, LOOK_EVERY};
use crate::{
    control_api::Pending,
    counted,
    handover::HandedOver,
    kernel_state::{Attached, FoundTap},
    machine_orders::{MachineOrders, Snapshots},
    parts::Parts,
    persisted_questions,
    policy_apply::PolicyChanges,
    privileges,
    process::{Api, Engines, Metrics},
    service_manager::ServiceManager,
    vm::Vm,
    vm_changes::VmChanges,
};

/// Line on stdout once guests are served.
const READY: &str = "slipgate: ready";

/// The descriptors that a successor has a use for.
pub(super) fn descriptors<'a>(
    attached: &'a Attached,
    metrics: Option<&'a Metrics>,
    apis: &'a [Api],
) -> impl Iterator<Item = BorrowedFd<'a>> {
    let ports = attached.workers.iter();
    ports
        .map(|worker| worker.port.fd.as_fd())
        .chain(attached.held_sockets())
        .chain(metrics.map(Metrics::listener))
        .chain(apis.iter().map(Api::listener))
}

impl Broker {
    pub(crate) fn start(mut attached: Attached, log: &str, vm: Option<Vm>) -> anyhow::Result<Self> {
        let owner = std::env::var("SUDO_UID").ok();
        let owner = owner.and_then(|uid| uid.parse().ok());
        let owner = owner.unwrap_or_else(|| nix::unistd::getuid().as_raw());
        let socket = match attached.config.is_daemon {
            true => crate::DAEMON_SOCKET.to_owned(),
            false => format!("{}.sock", attached.first_row()),
        };
        let socket = attached.datapath.paths().run_dir.join(socket);
        attached.read_translated();
        let reserved_ports = attached.ports_in_use().unwrap_or_default();
        let start = |attached: &mut Attached| {
            let control = ControlServer::bind(&socket, owner)
                .with_context(|| format!("listening on the control socket {}", socket.display()))?;
            // What may fail for the user's reasons comes first.
            attached.reserve_forwards()?;
            let (engines, adopted) = Engines::start(attached, &reserved_ports, log, ENGINE_WITHIN)?;
            attached.write_forwards()?;
            // Adopted flows and the engine's first ones may have claimed next hops.
            attached.refresh_next_hops()?;
            anyhow::Ok((control, engines, adopted))
        };
        let (control, engines, adopted) = match start(&mut attached) {
            Ok(started) => started,
            Err(e) => {
                attached.give_up();
                return Err(e);
            }
        };
        if attached.has_adopted() && !attached.config.new_vms {
            match adopted {
                0 => tracing::info!("took over from a predecessor; none of its flows lives on"),
                flows => tracing::info!("took over {} of a predecessor", counted(flows, "flow")),
            }
        }
        let vm_changes = match VmChanges::new(&attached) {
            Ok(vm_changes) => vm_changes,
            Err(e) => {
                attached.give_up();
                return Err(e);
            }
        };
        let mut vm = vm;
        if let (Some(vm), Some(served)) = (&mut vm, attached.config.vms.first()) {
            vm.resets.served_by(&socket, &served.name);
        }
        let snapshots = attached.config.snapshot_dir.clone();
        let most = attached.config.snapshots_max;
        let snapshots = snapshots.map(|directory| Snapshots { directory, most });
        let machine_orders = match MachineOrders::new(snapshots, socket.clone()) {
            Ok(orders) => orders,
            Err(e) => {
                attached.give_up();
                return Err(e).context("making an eventfd");
            }
        };
        let mut broker = Self {
            programs_log: attached.datapath.take_log(),
            parts: Parts::new(attached, engines, control),
            pending: Pending::default(),
            policies: PolicyChanges::default(),
            vm_changes,
            machine_orders,
            stopping: None,
            vm,
            reserved_ports,
            look_due: Instant::now() + LOOK_EVERY,
            metrics: None,
            apis: Vec::new(),
            service_manager: ServiceManager::of_this_process(),
        };
        broker.parts.attached.close_departed()?;
        if let Err(e) = broker.parts.attached.serve_taps() {
            let goes_on = broker.vm.is_none() && broker.parts.attached.has_adopted();
            let e = match &mut broker.vm {
                Some(vm) => vm.blame(e),
                None => e,
            };
            // A predecessor's flows go on; none does for a guest that never ran. What fails here is
            // not what went wrong.
            if !goes_on {
                let found = broker.parts.attached.found_taps();
                let _ = broker.stop(OnExit::Detach);
                found.iter().for_each(FoundTap::restore);
            }
            return Err(e);
        }
        for worker in &mut broker.parts.attached.workers {
            worker.open_questions.clear();
        }
        // What is left has no use here.
        broker.parts.attached.handed_over = HandedOver::default();
        broker.parts.attached.forget_former();
        broker.parts.attached.datapath.set_serves(true);
        broker.parts.attached.warn_of_paused();
        if broker.vm.is_none() && !broker.parts.attached.config.is_daemon {
            broker.parts.attached.hint_at_queues();
        }
        if let Some(listener) = broker.parts.attached.metrics.take() {
            broker.metrics = Some(Metrics::new(listener, &broker.parts.attached, log));
        }
        for (listener, may_change) in std::mem::take(&mut broker.parts.attached.api) {
            let api = Api::new(listener, may_change, &broker.parts.attached, log);
            broker.apis.push(api);
        }
        broker.parts.attached.hold_guard();
        privileges::limit_broker(broker.parts.attached.config.is_daemon)
            .context("giving up privileges that the broker does not need")?;
        Ok(broker)
    }

    pub(crate) fn announce(&self) {
        let a = &self.parts.attached;
        let names: Vec<_> = a.vms.iter().map(|vm| vm.config.name.as_str()).collect();
        let mut out = std::io::stdout().lock();
        let written = writeln!(
            out,
            "{READY}: {} by {}, {} {}",
            match (names.len(), a.config.is_daemon) {
                (0, _) => "no VM yet".to_owned(),
                (vms, true) => counted(vms as u64, "VM"),
                _ => names.join(", "),
            },
            a.uplink.name,
            match a.workers.len() {
                1 => "engine port",
                _ => "engine ports",
            },
            a.port_names()
        )
        .and_then(|()| out.flush());
        // Guests are served all the same.
        if let Err(e) = written {
            tracing::warn!("writing `ready` to stdout: {e}");
        }
        let status = format!("Guests reach the world by {}.", a.uplink.name);
        self.service_manager.ready(&status);
        self.service_manager.forget_kept();
    }

    /// Ends the processes in order.
    pub(crate) fn stop(mut self, exit: OnExit) -> anyhow::Result<()> {
        self.service_manager.stopping();
        self.parts.attached.datapath.set_serves(false);
        if exit == OnExit::Detach {
            // Nothing new comes from the guests while their flows end.
            self.parts.attached.shut_taps()?;
        } else {
            // While guests are served: what a successor waits for comes behind.
            Api::finish(&mut self.apis);
        }
        let ports = &self.reserved_ports;
        let questions =
            self.parts
                .engines
                .stop(exit, &mut self.parts.attached, ports, ENGINE_WITHIN)?;
        match exit {
            OnExit::Keep => {
                let attached = &self.parts.attached;
                let run_dir = &attached.datapath.paths().run_dir;
                for (owner, questions) in attached.owners().zip(&questions) {
                    persisted_questions::keep(run_dir, owner.row(), questions);
                }
                let fds = descriptors(attached, self.metrics.as_ref(), &self.apis);
                self.service_manager.keep(fds);
                // A successor may wait for the daemon's lock: all else is given up before.
                let lock = self.parts.attached.daemon.take();
                // No successor needs it, and its end waits in the kernel.
                let guard = self.parts.attached.held_guard.take();
                drop((self.apis, self.metrics));
                drop((self.parts.control, self.parts.attached));
                drop(lock);
                drop(guard);
                tracing::info!("stopped; flows go on in the kernel");
            }
            OnExit::Detach => {
                // After the events of flows that have ended.
                Api::finish(&mut self.apis);
                // Its socket is in the directory that goes.
                drop(self.parts.control);
                let pin_dir = self.parts.attached.config.pin_dir.clone();
                let all = self.parts.attached.detach()?;
                // Others' may be in it, of other network namespaces.
                let _ = std::fs::remove_dir(pin_dir);
                tracing::info!(
                    "stopped; {}",
                    if all {
                        "nothing is left in the kernel"
                    } else {
                        "others still use the maps"
                    }
                );
            }
        }
        Ok(())
    }
}
