//! Creates the machine's PCI devices: the network card, the entropy device, the disks, then
//! vsock. A snapshot has them in this order.
use std::sync::Arc;

use super::{MachineError, SerialIo};
use crate::{
    GuestMemory, ThreadSetup,
    counters::DeviceCounters,
    interrupt::{Doorbells, MsiFabric},
    layout::{self, Window},
    pci::{self, Windows},
    virtio::{
        VirtioDevice,
        block::{Disk, DiskConfig, DiskCounters},
        net::{Net, NetConfig, NetCounters},
        rng::Rng,
        transport::{TransportCounters, VirtioPci},
        vsock::{Vsock, VsockConfig, VsockCounters},
    },
};

/// The machine's devices, whether it boots or is restored.
pub struct Devices {
    /// Network card; `None` for a machine without one.
    pub net: Option<NetConfig>,
    /// Disks, in the order in which the guest finds them.
    pub disks: Vec<DiskConfig>,
    /// Connections with programs of the host; `None` for a machine without.
    pub vsock: Option<VsockConfig>,
    /// Input and output of the serial console.
    pub serial: SerialIo,
}

/// Parts of the machine that devices use.
pub(super) struct Platform {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) msi: Arc<dyn MsiFabric>,
    pub(super) doorbells: Arc<dyn Doorbells>,
    pub(super) mmio64: Option<Window>,
}

/// Returns the PCI root with all devices, and the devices' counters.
pub(super) fn root(
    platform: &Platform,
    net: Option<NetConfig>,
    disks: Vec<DiskConfig>,
    vsock: Option<VsockConfig>,
    threads: &ThreadSetup,
) -> Result<(pci::Root, DeviceCounters), MachineError> {
    let range = |window: Window| window.start..window.end();
    let mut root = pci::Root::new(Windows {
        mmio32: range(layout::MMIO32),
        mmio64: platform.mmio64.map_or(0..0, range),
    });
    let mut counters = DeviceCounters::default();
    if let Some(config) = net {
        let counted = NetCounters::new(config.taps.len());
        let card = Net::new(config, threads.clone(), counted.clone())?;
        let transport = add(&mut root, platform, Box::new(card))?;
        counters.net = Some((counted, transport));
    }
    let rng =
        Rng::new(threads.clone()).map_err(MachineError::host("starting the entropy device"))?;
    counters.rng = Some(add(&mut root, platform, Box::new(rng))?);
    for (number, config) in disks.into_iter().enumerate() {
        let counted: Arc<DiskCounters> = Arc::default();
        let disk = Disk::new(number, config, threads, counted.clone())
            .map_err(|source| MachineError::Disk { number, source })?;
        let transport = add(&mut root, platform, Box::new(disk))?;
        counters.disks.push((counted, transport));
    }
    if let Some(config) = vsock {
        let counted: Arc<VsockCounters> = Arc::default();
        let device = Vsock::new(config, threads, counted.clone())?;
        let transport = add(&mut root, platform, Box::new(device))?;
        counters.vsock = Some((counted, transport));
    }
    Ok((root, counters))
}

fn add(
    root: &mut pci::Root,
    platform: &Platform,
    device: Box<dyn VirtioDevice>,
) -> Result<Arc<TransportCounters>, MachineError> {
    let Platform {
        memory,
        msi,
        doorbells,
        ..
    } = platform;
    let function = VirtioPci::new(device, memory.clone(), msi.clone(), doorbells.clone())?;
    let counters = function.counters();
    root.add(Box::new(function))?;
    Ok(counters)
}
