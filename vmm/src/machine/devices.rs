//! Creates the machine's PCI devices: the network card, the entropy device, the disks, vsock, then
//! the balloon. A snapshot has them in this order.
use std::sync::Arc;

use super::{MachineError, SerialIo};
use crate::{
    GuestMemory, ThreadSetup,
    counters::DeviceCounters,
    interrupt::{Doorbells, MsiFabric},
    layout::{self, Window},
    memory::total_bytes,
    pci::{self, Windows},
    virtio::{
        VirtioDevice,
        balloon::{Balloon, BalloonConfig, BalloonCounters, BalloonError, Target},
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
    /// Memory that the guest gives back; `None` for a machine without.
    pub balloon: Option<BalloonConfig>,
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

/// The devices that were made.
pub(super) struct Made {
    pub(super) root: pci::Root,
    pub(super) counters: DeviceCounters,
    /// What sets the size of the balloon, if there is one.
    pub(super) balloon: Option<Target>,
}

/// Makes the PCI root with all devices.
pub(super) fn make(
    platform: &Platform,
    net: Option<NetConfig>,
    disks: Vec<DiskConfig>,
    (vsock, balloon): (Option<VsockConfig>, Option<BalloonConfig>),
    threads: &ThreadSetup,
) -> Result<Made, MachineError> {
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
    let mut target = None;
    if let Some(config) = balloon {
        let counted: Arc<BalloonCounters> = Arc::default();
        let (wanted, memory) = (config.target_bytes, total_bytes(&platform.memory));
        if wanted > memory {
            return Err(BalloonError::Target { wanted, memory }.into());
        }
        let device = Balloon::new(config, threads, counted.clone())?;
        target = Some(device.target());
        let transport = add(&mut root, platform, Box::new(device))?;
        counters.balloon = Some((counted, transport));
    }
    Ok(Made {
        root,
        counters,
        balloon: target,
    })
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
