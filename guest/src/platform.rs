//! Interface between the workloads and the machine. The bootable image implements it on bare
//! hardware; tests implement it on threads and fakes.
//!
//! # Theory of operation
//! Each CPU runs the same loop over its own queue pair. The CPUs share only the state of the
//! workloads:
//! ```text
//! loop {
//!     poll the stack over `nic`;          // frames in and out, no system calls, no interrupts
//!     nic.flush();                        // notify the device once, if it asked for that
//!     if nic.arm() {                      // interrupts on; true: nothing came in meanwhile
//!         platform.idle(next_timer);      // halts until an interrupt, a wake or that time
//!     }
//! }
//! ```
//! The image's `main` parses the command line into the workloads' `Shared`
//! (`Shared::parse(command_line, cpus)`). It runs the self-test first if the command line asks for
//! it (`shared.selftest()`), then starts `run(cpu, &platform, nic, &shared) -> u8` on every CPU.
//! CPU 0's result is the machine's exit status.
//!
//! A frame, a [`Platform::wake`] or a timer that comes between `arm` and `idle` makes `idle`
//! return at once, so no wake-up is lost.

/// CPUs, time, randomness and the console of the machine. Shared by all CPUs.
pub trait Platform: Sync {
    /// Returns the number of CPUs that run the workloads, each with a queue pair of its own. At
    /// least 1.
    fn cpus(&self) -> usize;
    /// Returns nanoseconds since some moment before boot. The clock never goes back, and is the
    /// same on all CPUs.
    fn now_ns(&self) -> u64;
    /// Returns the time of day at 0 of [`Platform::now_ns`], in milliseconds since 1970, or 0 if it
    /// is not known. It need not be exact: TCP timestamps start with it.
    fn booted_unix_ms(&self) -> u64;
    /// Halts the calling CPU until an interrupt, a [`Platform::wake`], or the time `until_ns` (on
    /// the clock of [`Platform::now_ns`]). May return early, for no reason.
    fn idle(&self, until_ns: Option<u64>);
    /// Ends the [`Platform::idle`] of CPU number `cpu`, or its next one.
    fn wake(&self, cpu: usize);
    /// Fills `out` with random bytes, good for ports and sequence numbers, not for keys.
    fn random(&self, out: &mut [u8]);
    /// Prints a line on the console, never mixed with another CPU's. `line` has no newline.
    fn print_line(&self, line: &str);
    /// Returns a number that is another one when the machine was restored from a snapshot since; 0 where
    /// nothing tells.
    fn generation(&self) -> u64 {
        0
    }
    /// Resets the machine; returns where there is none.
    fn reset(&self) {}
}

/// One CPU's queue pair of the network device.
///
/// Sending a frame (by the `TxToken`) only queues it: [`Nic::flush`] notifies the device. The
/// device segments a frame that has [`smoltcp::phy::PacketMeta::segmentation_offload_size`] (TSO;
/// for UDP, USO).
pub trait Nic: smoltcp::phy::Device {
    /// Returns the device's MAC address, the same for all pairs.
    fn mac(&self) -> [u8; 6];
    /// Returns this pair's index and the number of pairs in use: `(index, pairs)`.
    fn pair(&self) -> (u16, u16);
    /// Publishes queued frames to the device, and notifies it if it asked for that.
    fn flush(&mut self);
    /// Turns the receive interrupt on for the next frame. Returns false if one has arrived already:
    /// poll again.
    fn arm(&mut self) -> bool;
    /// Returns whether the device can segment UDP frames (USO).
    fn can_segment_udp(&self) -> bool;
    /// Returns this pair's counters.
    fn counters(&self) -> NicCounters;
}

/// A queue pair's counters, since the device was brought up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Received frames. A merged or large one counts once.
    pub rx_frames: u64,
    /// Bytes of received frames, from the Ethernet header on.
    pub rx_bytes: u64,
    /// Received frames that took more than one buffer.
    pub rx_merged: u64,
    /// Received frames with a checksum to be completed, or marked as checked.
    pub rx_checksum_offloaded: u64,
    /// Received frames that the driver dropped because they were malformed.
    pub rx_dropped: u64,
    /// Sent frames. One that the device segments counts once.
    pub tx_frames: u64,
    /// Bytes of sent frames, from the Ethernet header on.
    pub tx_bytes: u64,
    /// Sent frames that the device was to segment.
    pub tx_segmented: u64,
    /// Times that the queue was full when a frame was to be sent.
    pub tx_full: u64,
    /// Notifications written to the device.
    pub kicks: u64,
    /// Interrupts taken for this pair's vectors.
    pub interrupts: u64,
}
