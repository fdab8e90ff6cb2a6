//! TAPs that go and come again, and MTUs that change.
use std::time::{Duration, Instant};

use anyhow::Context as _;
use slipgate_abi::IfIndex;
use slipgate_control::{
    device::Device,
    serve::{self, Served, TapChange},
};
use slipgate_ipc::{api::Event, engine::VmSpec};

use super::{Attached, xdp};

impl Attached {
    /// Serves TAPs of these names that were recreated (with another index and no program), and
    /// follows changed MTUs. Returns the changed VMs for the engines,
    /// each with its worker.
    pub(crate) fn follow_taps<'n>(
        &mut self,
        names: impl IntoIterator<Item = &'n String>,
    ) -> anyhow::Result<Vec<(usize, VmSpec)>> {
        let on_tap = |name: &String| Some(&self.vms[self.vms.on_tap(name)?]);
        // A VM that the engine does not know yet is served when it does.
        let known = names.into_iter().filter_map(on_tap).filter(|vm| vm.is_up);
        let served: Vec<Served> = known
            .map(|vm| Served {
                vm_row: vm.open.row,
                tap: vm.config.tap.clone(),
                ifindex: vm.tap_ifindex,
                mtu: vm.mtu,
            })
            .collect();
        if served.is_empty() {
            return Ok(Vec::new());
        }
        let network = self.watch.network();
        let changes = serve::follow_taps(&self.datapath, network, &served, self.tap_hook())?;
        let mut tell = Vec::new();
        for (row, change) in changes {
            let Some(index) = self.vms.in_row(row) else {
                continue;
            };
            let tap = self.vms[index].config.tap.clone();
            match change {
                TapChange::Gone => {
                    tracing::warn!("the TAP {tap} is gone; waiting for it");
                    let gone = self.vms[index].tap_ifindex.take();
                    self.forget_tap(gone);
                    let vm = self.vms[index].config.name.clone();
                    self.events.push(Event::TapGone { vm });
                }
                TapChange::Again { ifindex } => {
                    tracing::info!("the TAP {tap} is there");
                    let before = self.vms[index].tap_ifindex.replace(ifindex);
                    self.forget_tap(before);
                    self.note_tap(self.vms[index].worker, Some(ifindex))?;
                    let vm = self.vms[index].config.name.clone();
                    self.events.push(Event::TapCame { vm });
                    // It may be gone again already: then there will be another notice.
                    if let Err(e) = self.equip(&tap, ifindex) {
                        tracing::warn!("{tap}: {e:#}");
                    }
                    self.set_rates_at(index);
                }
                TapChange::Mtu(_) => {}
            }
            let link = self.watch.network().link_by_name(&tap);
            let mtu = link.map_or(self.vms[index].mtu, |link| link.mtu);
            if mtu != self.vms[index].mtu {
                self.vms[index].mtu = mtu;
                let vm = &self.vms[index];
                tell.push((vm.worker, self.vm_spec(vm)));
            }
        }
        Ok(tell)
    }

    /// Applies the settings, besides the program, that a recreated TAP needs.
    fn equip(&self, tap: &str, ifindex: IfIndex) -> anyhow::Result<()> {
        if let Some(mtu) = self.config.network.mtu {
            Device::with_index(ifindex)?.set_mtu(mtu)?;
        }
        xdp::guard(&self.datapath, &self.config, tap, ifindex)?;
        Ok(())
    }

    /// Waits until the TAPs that are removed with their VMM are gone.
    pub(crate) fn await_taps_end(&mut self, within: Duration) {
        let until = Instant::now() + within;
        for vm in self.vms.iter_mut() {
            while let Some(ifindex) = vm.tap_ifindex {
                if Device::with_index(ifindex).is_err() {
                    vm.tap_ifindex = None;
                } else if Instant::now() >= until {
                    tracing::warn!("the TAP {} is still there", vm.config.tap);
                    break;
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    /// Takes all TAPs down.
    pub(crate) fn shut_taps(&self) -> anyhow::Result<()> {
        for vm in self.vms.iter() {
            if let Some(ifindex) = vm.tap_ifindex {
                serve::shut_tap(&self.datapath, ifindex)
                    .with_context(|| format!("shutting {}", vm.config.tap))?;
            }
        }
        Ok(())
    }
}
