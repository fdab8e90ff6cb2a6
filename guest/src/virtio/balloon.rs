//! Driver of the balloon (virtio 1.2, 5.5): pages given to the host, polled, on one CPU.
use super::{
    DeviceError,
    dma::Dma,
    ring::{Ring, Segment, feature::EVENT_IDX},
    transport::{Doorbell, NO_VECTOR, ResetFirst, Transport},
};
use crate::pci::Registers;

/// PCI vendor and device id of a virtio balloon.
pub const BALLOON: (u16, u16) = (0x1AF4, 0x1045);
/// Bytes of a page of the balloon.
pub const PAGE_BYTES: usize = 4096;
/// Pages that are given or taken back at a time, at most.
pub const PAGES: usize = 1024;

/// Feature bit: free memory is reported.
const REPORTING: u64 = 1 << 5;
/// The queues for pages given, pages taken back, and reports: by the specification, and where
/// drivers have it that count only the queues that there are.
const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const REPORTS: [u16; 2] = [4, 2];
/// Place of `actual` in the configuration.
const ACTUAL_AT: usize = 4;

/// Balloon in operation. It is reset when this is dropped, which takes all pages back.
pub struct Balloon<R: Registers + Clone> {
    device: ResetFirst<R>,
    inflate: Queue<R>,
    deflate: Queue<R>,
    /// `None`: the device takes no reports.
    reports: Option<Queue<R>>,
    list: Dma,
}

struct Queue<R> {
    ring: Ring,
    doorbell: Doorbell<R>,
}

impl<R: Registers + Clone> Balloon<R> {
    /// Resets and initialises the balloon.
    ///
    /// # Errors
    /// The device lacks what is needed, or behaves wrongly.
    pub fn bring_up(transport: Transport<R>) -> Result<Self, DeviceError> {
        let features = transport.negotiate(REPORTING | EVENT_IDX)?;
        let make = |index| {
            let (mut ring, doorbell) = transport.make_queue(index, 16, NO_VECTOR, features)?;
            ring.disarm();
            Ok::<_, DeviceError>(Queue { ring, doorbell })
        };
        let reports = match features & REPORTING {
            0 => None,
            _ => Some(make(REPORTS[0]).or_else(|_| make(REPORTS[1]))?),
        };
        let (inflate, deflate) = (make(INFLATE)?, make(DEFLATE)?);
        transport.start();
        Ok(Balloon {
            device: ResetFirst(transport),
            inflate,
            deflate,
            reports,
            list: Dma::new(PAGES * 4),
        })
    }

    /// Returns the number of pages that the host asks for.
    pub fn target(&self) -> u32 {
        self.device.0.device_config(|device| device.read32(0))
    }

    /// Tells the host how many pages it has.
    pub fn tell(&self, pages: u32) {
        self.device.0.write_device_config(ACTUAL_AT, pages);
    }

    /// Gives the host the pages of a block, [`PAGES`] at most. Their content is lost.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn give(&mut self, block: &Dma, pages: usize) -> Result<(), DeviceError> {
        let list = self.list(block, pages);
        self.inflate.ask(list, "pages that were given")
    }

    /// Takes pages of a block back.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn take_back(&mut self, block: &Dma, pages: usize) -> Result<(), DeviceError> {
        let list = self.list(block, pages);
        self.deflate.ask(list, "pages that were taken back")
    }

    /// Reports the first bytes of a block as free. Their content is lost.
    ///
    /// # Errors
    /// The device takes no reports, or does not answer.
    pub fn report(&mut self, block: &Dma, bytes: usize) -> Result<(), DeviceError> {
        let missing = DeviceError::Missing("reports of free pages");
        let free = Segment {
            address: block.address(0),
            length: bytes as u32,
            device_writes: true,
        };
        let reports = self.reports.as_mut().ok_or(missing)?;
        reports.ask(free, "a report of free pages")
    }

    /// Writes the numbers of a block's pages.
    fn list(&mut self, block: &Dma, pages: usize) -> Segment {
        // SAFETY: the device has no list now.
        let list = unsafe { self.list.bytes_mut(0, pages * 4) };
        for (page, number) in list.chunks_exact_mut(4).enumerate() {
            let at = block.address(page * PAGE_BYTES) / PAGE_BYTES as u64;
            number.copy_from_slice(&(at as u32).to_le_bytes());
        }
        Segment {
            address: self.list.address(0),
            length: pages as u32 * 4,
            device_writes: false,
        }
    }
}

impl<R: Registers + Clone> Queue<R> {
    fn ask(&mut self, segment: Segment, what: &'static str) -> Result<(), DeviceError> {
        let silent = DeviceError::Silent(what);
        self.ring.offer_one(segment).ok_or(silent)?;
        if self.ring.wants_kick() {
            self.doorbell.ring();
        }
        let mut patience = super::net::patience();
        loop {
            if let Some(used) = self.ring.take_used() {
                self.ring.release(used.head);
                return Ok(());
            }
            if !patience() {
                return Err(silent);
            }
        }
    }
}
