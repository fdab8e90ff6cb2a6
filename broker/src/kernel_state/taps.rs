//! TAPs: attached and brought up, recorded for a successor, and shut when no process serves them.
use anyhow::Context as _;
use slipgate_abi::IfIndex;
use slipgate_control::{attach::Program, device::Device, serve, vm};
use slipgate_policy::one_line;

use super::{Attached, ServedVm, xdp};

impl Attached {
    /// Whether a device is a TAP with a guest's program, of any process.
    pub(super) fn is_served(&self, ifindex: IfIndex) -> bool {
        let program = Program::GuestEgress;
        self.datapath.is_attached(program, ifindex)
    }

    pub(crate) fn serve_taps(&mut self) -> anyhow::Result<()> {
        (0..self.vms.len()).try_for_each(|index| self.serve_tap(index))
    }

    /// Attaches to a VM's TAP and brings it up.
    pub(crate) fn serve_tap(&mut self, index: usize) -> anyhow::Result<()> {
        self.vms[index].is_up = true;
        let vm = &self.vms[index];
        let Some(ifindex) = vm.tap_ifindex else {
            return Ok(());
        };
        let what = || format!("serving {} on {}", vm.config.name, vm.config.tap);
        xdp::guard(&self.datapath, &self.config, &vm.config.tap, ifindex).with_context(what)?;
        serve::serve_tap(&self.datapath, ifindex, self.hook).with_context(what)
    }

    /// Records the TAPs of this process, and those of a predecessor until they are shut. The VMs'
    /// rows are not used for this, because the engine can write them.
    pub(crate) fn note_taps(&self) -> anyhow::Result<()> {
        let ours = self.vms.iter().filter_map(|vm| vm.tap_ifindex);
        let taps = ours.chain(self.former_taps.iter().copied()).collect();
        Ok(self.owner.note_taps(self.datapath.paths(), &taps)?)
    }

    /// Shuts out VMs of a predecessor that are no longer served. The engine has ended their flows.
    pub(crate) fn close_departed(&mut self) -> anyhow::Result<()> {
        self.shut_departed()?;
        let maps = self.datapath.maps();
        let departed: Vec<_> = vm::rows_of(maps, self.owner.row())
            .filter(|row| self.vms.iter().all(|vm| vm.open.row != *row))
            .collect();
        for row in departed {
            let name = one_line(&vm::name_of(maps, row).unwrap_or_default());
            let what = || format!("closing the row of {name}, which is not served any more");
            vm::close(maps, row).with_context(what)?;
            match self.config.new_vms {
                // Of the name that is ours now.
                true => tracing::info!("ended what an earlier VM of this name had left"),
                false => tracing::info!("{name} is not served any more: its TAP is shut"),
            }
        }
        Ok(())
    }

    /// Takes down the TAPs that only a predecessor served.
    fn shut_departed(&mut self) -> anyhow::Result<()> {
        for tap in std::mem::take(&mut self.former_taps) {
            let is_ours = self.vms.iter().any(|vm| vm.tap_ifindex == Some(tap));
            // An index that came again is another device, without our program.
            if is_ours || !self.is_served(tap) {
                continue;
            }
            let what =
                || format!("shutting the TAP with index {tap}, which is not served any more");
            serve::shut_tap(&self.datapath, tap).with_context(what)?;
            self.datapath
                .detach(Program::Guard, tap)
                .with_context(what)?;
        }
        self.note_taps()?;
        let paths = self.datapath.paths();
        Ok(self.owner.forget_merged_taps(paths)?)
    }

    /// Takes a VM's TAP down and removes our programs from it. A TAP that is gone is no error.
    pub(crate) fn shut_tap_of(&self, vm: &ServedVm) -> anyhow::Result<()> {
        let Some(ifindex) = vm.tap_ifindex else {
            return Ok(());
        };
        let what = || format!("shutting {}", vm.config.tap);
        serve::shut_tap(&self.datapath, ifindex).with_context(what)?;
        self.datapath
            .detach(Program::Guard, ifindex)
            .with_context(what)?;
        Ok(())
    }

    /// Disables forwarding on the TAPs and the port, so that the host routes none of their packets:
    /// `sysctl net.ipv4.ip_forward=1` enables it on every device.
    pub(crate) fn keep_unrouted(&self) {
        let taps = self.vms.iter().filter_map(|vm| vm.tap_ifindex);
        for ifindex in taps.chain([self.port.ifindex]) {
            let kept = Device::with_index(ifindex).and_then(|device| device.set_forwarding(false));
            if let Err(e) = kept {
                // One that is gone: a notice is on its way.
                tracing::debug!("{e}");
            }
        }
    }

    /// Attaches the guard to, or detaches it from, TAPs whose VMM has changed segmentation offload.
    pub(crate) fn look_at_guards(&mut self) {
        let mut locked = None;
        for vm in &self.vms {
            let Some(ifindex) = vm.tap_ifindex else {
                continue;
            };
            match xdp::guard(&self.datapath, &self.config, &vm.config.tap, ifindex) {
                Ok(()) => {}
                // The others would wait for it too.
                Err(e) if e.is_locked() => {
                    locked = Some(e);
                    break;
                }
                Err(e) => tracing::debug!("the guard of {}: {e}", vm.config.tap),
            }
        }
        if let (Some(e), false) = (&locked, self.told_of_lock) {
            tracing::warn!("what TAPs need is looked at later: {e}");
        }
        self.told_of_lock = locked.is_some();
    }

    /// Whether a TAP exists that should be served and is not.
    pub(crate) fn lacks_a_tap(&self) -> bool {
        let network = self.watch.network();
        let is_there = |name: &str| network.link_by_name(name).is_some();
        let mut vms = self.vms.iter();
        vms.any(|vm| vm.tap_ifindex.is_none() && is_there(&vm.config.tap))
    }
}
