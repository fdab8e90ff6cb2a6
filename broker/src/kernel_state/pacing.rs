//! VMs' rates in force: the limits that the programs apply, and the queues that shape them. Where a
//! queue can't be made the rate is policed instead, and the log says why, once.
use std::collections::HashMap;

use slipgate_abi::{Direction, IfIndex, VmId, VmRates, VmRow};
use slipgate_control::{
    attach::Program,
    device::Device,
    pacing::{self, PacingDevice},
    serve,
};

use super::{Attached, ServedVm, budgets::has_frozen};

/// Queues that this process has made.
#[derive(Debug, Default)]
pub(crate) struct Pacing {
    device: Option<PacingDevice>,
    queues: HashMap<VmRow, Queues>,
    /// Whether the log says that the kernel can't shape what guests send.
    told: bool,
}

/// Queues of a VM: the rates that they have, L3 bytes per second; 0: there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Queues {
    tx: u64,
    rx: u64,
    tap: Option<IfIndex>,
}

impl Attached {
    /// Sets a VM's rates, and has them shaped.
    pub(crate) fn set_rates_of(&mut self, vm: &ServedVm) {
        self.put_rates(vm.open.row, vm.tap_ifindex, vm.config.limits.rates);
    }

    /// Sets the rates of every VM from its quotas.
    pub(crate) fn set_rates(&mut self) {
        for at in 0..self.vms.len() {
            self.set_rates_at(at);
        }
    }

    /// Sets the rates of these VMs from their quotas.
    pub(crate) fn set_rates_of_all(&mut self, vms: &[VmId]) {
        for id in vms {
            if let Some(at) = self.index_of_id(*id) {
                self.set_rates_at(at);
            }
        }
    }

    /// Sets the rates of one VM, by its place.
    pub(crate) fn set_rates_at(&mut self, at: usize) {
        let vm = &self.vms[at];
        self.put_rates(vm.open.row, vm.tap_ifindex, vm.config.limits.rates);
    }

    fn put_rates(&mut self, row: VmRow, tap: Option<IfIndex>, rates: VmRates) {
        let limited = rates.is_limited().then_some(rates);
        self.datapath.maps().set_rates(row, limited);
        self.shape(row, tap, rates);
    }

    fn shape(&mut self, row: VmRow, tap: Option<IfIndex>, rates: VmRates) {
        let limits = self.datapath.maps().rate_limits(row);
        // One that is frozen is thawed when its budget is taken away.
        if rates.has_budget() || limits.is_some_and(has_frozen) {
            self.budgets.begin();
        }
        let wanted = Queues {
            tx: rates.tx.bytes_per_second,
            rx: rates.rx.bytes_per_second,
            tap,
        };
        let had = self.pacing.queues.get(&row).copied();
        if had == Some(wanted) {
            return;
        }
        let none = Queues {
            tap,
            ..Queues::default()
        };
        if had.is_none() && wanted == none && !self.may_have_queues(row) {
            // A dead VM of another row may have left its queue at the TAP. Looked at once.
            if let Some(tap) = tap {
                note(pacing::unshape_tap(tap));
                self.pacing.queues.insert(row, wanted);
            }
            return;
        }
        let tx = (wanted.tx != 0)
            .then(|| self.shape_tx(row, wanted.tx))
            .flatten();
        let rx = tap.filter(|_| wanted.rx != 0);
        let rx = rx.filter(|tap| shapes_tap(*tap, wanted.rx));
        let maps = self.datapath.maps();
        maps.set_pacer(row, Direction::Tx, tx);
        maps.set_pacer(row, Direction::Rx, rx);
        if let (None, Some(tap)) = (rx, tap) {
            note(pacing::unshape_tap(tap));
        }
        if let (None, Some(device)) = (tx, &self.pacing.device) {
            note(device.unshape(row));
        }
        self.pacing.queues.insert(row, wanted);
    }

    /// Whether a predecessor may have made queues for the row.
    fn may_have_queues(&self, row: VmRow) -> bool {
        let limits = self.datapath.maps().rate_limits(row);
        limits.is_some_and(|limits| {
            limits.pacer(Direction::Tx) != 0 || limits.pacer(Direction::Rx) != 0
        })
    }

    /// Makes the class of a VM at the pacing device. Returns the device for the programs; `None` if the
    /// rate is policed.
    fn shape_tx(&mut self, row: VmRow, bytes_per_second: u64) -> Option<IfIndex> {
        let shaped = self.pacing_device().and_then(|device| {
            device.shape(row, bytes_per_second)?;
            Ok(device.near)
        });
        match shaped {
            Ok(near) => Some(near),
            Err(e) => {
                if !std::mem::replace(&mut self.pacing.told, true) {
                    tracing::warn!(
                        "rates from guests are policed, not shaped, so TCP gets less: {e}"
                    );
                }
                None
            }
        }
    }

    /// Returns the pacing device, which is made when a VM needs it first.
    fn pacing_device(&mut self) -> slipgate_control::Result<&PacingDevice> {
        if self.pacing.device.is_none() {
            let device = PacingDevice::open(self.first_row())?;
            serve::serve_pacer(&self.datapath, &device, self.tap_hook())?;
            self.pacing.device = Some(device);
        }
        Ok(self.pacing.device.as_ref().expect("made just now"))
    }

    /// Makes the pacing device again if it is gone.
    pub(crate) fn keep_pacing_device(&mut self) {
        let Some(device) = &self.pacing.device else {
            return;
        };
        if Device::with_index(device.near).is_ok() {
            return;
        }
        tracing::warn!("{} is gone: it is made again", device.name);
        note(self.datapath.remove_defunct_at(device.far).map(drop));
        self.pacing.device = None;
        for queues in self.pacing.queues.values_mut() {
            queues.tx = 0;
        }
        self.set_rates();
    }

    /// Detaches from the pacing device, which goes with its owner's row.
    pub(super) fn detach_pacer(&self) -> slipgate_control::Result<()> {
        let Some(device) = &self.pacing.device else {
            return Ok(());
        };
        self.datapath.detach(Program::Pacer, device.far).map(drop)
    }

    /// Whether this is an end of the pacing device.
    pub(super) fn is_pacing_end(&self, ifindex: IfIndex) -> bool {
        let device = self.pacing.device.as_ref();
        device.is_some_and(|device| [device.near, device.far].contains(&ifindex))
    }

    /// Name of the pacing device, if there is one.
    pub(crate) fn pacing_device_name(&self) -> Option<&str> {
        self.pacing.device.as_ref().map(|device| &*device.name)
    }

    /// Forgets a VM that is gone from its TAP: the TAP has the kernel's queue again.
    pub(crate) fn unshape_tap_of(&mut self, row: VmRow, tap: Option<IfIndex>) {
        if let (Some(queues), Some(tap)) = (self.pacing.queues.get_mut(&row), tap)
            && queues.rx != 0
        {
            queues.rx = 0;
            self.datapath.maps().set_pacer(row, Direction::Rx, None);
            note(pacing::unshape_tap(tap));
        }
    }

    /// Removes the queues of a VM that is not served any more.
    pub(crate) fn unshape(&mut self, row: VmRow, tap: Option<IfIndex>) {
        self.unshape_tap_of(row, tap);
        let queues = self.pacing.queues.remove(&row);
        self.datapath.maps().set_pacer(row, Direction::Tx, None);
        if let (Some(Queues { tx: 1.., .. }), Some(device)) = (queues, &self.pacing.device) {
            note(device.unshape(row));
        }
    }
}

fn shapes_tap(tap: IfIndex, bytes_per_second: u64) -> bool {
    let name = || Device::with_index(tap).map_or_else(|_| tap.to_string(), |it| it.name().into());
    match pacing::shape_tap(tap, bytes_per_second) {
        Ok(true) => true,
        Ok(false) => {
            tracing::warn!(
                "{} has a queueing discipline that is not slipgate's: the rate to its guest is \
                 policed, so TCP gets less; `tc qdisc del dev {} root` frees it",
                name(),
                name()
            );
            false
        }
        Err(e) => {
            tracing::warn!(
                "the rate to the guest of {} is policed, not shaped, so TCP gets less: {e}",
                name()
            );
            false
        }
    }
}

/// A queue that stays does no more than it did.
pub(super) fn note(removed: slipgate_control::Result<()>) {
    if let Err(e) = removed {
        tracing::warn!("{e}");
    }
}
