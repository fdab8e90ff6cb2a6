//! What the workloads ask of the machine under them. The bootable image implements it over bare
//! hardware; tests implement it over whatever they like.
//!
//! # Theory of operation
//! Each CPU runs the same loop over its own queue pair, and shares nothing with the others but what
//! the workloads share themselves:
//! ```text
//! loop {
//!     poll the stack over `nic`;          // frames in and out, no system calls, no interrupts
//!     nic.flush();                        // tell the device once, if it wants to know
//!     if nic.arm() {                      // interrupts on; true: nothing came in meanwhile
//!         platform.idle(next_timer);      // halts until an interrupt, a wake or that time
//!     }
//! }
//! ```
//! The image's `main` reads the command line into the workloads' `Shared`
//! (`Shared::parse(command_line, cpus)`), runs the self-test first where it is asked for
//! (`shared.selftest()`), then starts on every CPU
//! `run(cpu, &platform, nic, &shared) -> u8`. What CPU 0 returns is the machine's exit status.
//!
//! A frame, a [`Platform::wake`] or a timer that comes between `arm` and `idle` makes `idle`
//! return at once, so no wake-up is lost.

/// The machine: CPUs, time, randomness and the console. Shared by all CPUs.
pub trait Platform: Sync {
    /// How many CPUs run the workloads, each with a queue pair of its own. At least 1.
    fn cpus(&self) -> usize;
    /// Nanoseconds since some moment before boot; never goes back, the same on all CPUs.
    fn now_ns(&self) -> u64;
    /// The time of day at 0 of [`Platform::now_ns`], in milliseconds since 1970, or 0 where nobody
    /// knows it. Not exact: TCP timestamps begin with it.
    fn booted_unix_ms(&self) -> u64;
    /// Halts the calling CPU until an interrupt, a [`Platform::wake`], or the time `until_ns` (on
    /// the clock of [`Platform::now_ns`]). May return early, for no reason.
    fn idle(&self, until_ns: Option<u64>);
    /// Ends the [`Platform::idle`] of CPU number `cpu`, or its next one.
    fn wake(&self, cpu: usize);
    /// Fills `out` with random bytes, good for ports and sequence numbers, not for keys.
    fn random(&self, out: &mut [u8]);
    /// Prints a line on the console, whole, never mixed with another CPU's. Without the newline.
    fn print_line(&self, line: &str);
}

/// One CPU's queue pair of the network device.
///
/// Sending a frame (by the `TxToken`) only queues it: [`Nic::flush`] tells the device. A frame with
/// [`smoltcp::phy::PacketMeta::segmentation_offload_size`] is cut by the device (TSO; for UDP, USO).
pub trait Nic: smoltcp::phy::Device {
    /// The device's MAC address, the same for all pairs.
    fn mac(&self) -> [u8; 6];
    /// How many queue pairs are in use, and which one this is: `(index, pairs)`.
    fn pair(&self) -> (u16, u16);
    /// Hands queued frames to the device; notifies it if it asked for that.
    fn flush(&mut self);
    /// Turns the receive interrupt on for the next frame. False: one is there already, poll again.
    fn arm(&mut self) -> bool;
    /// Whether the device can cut UDP frames (USO).
    fn can_segment_udp(&self) -> bool;
    /// What this pair has done so far.
    fn counters(&self) -> NicCounters;
}

/// A queue pair's counters, since the device was brought up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Frames received. A merged or large one counts once.
    pub rx_frames: u64,
    /// Their bytes, from the Ethernet header on.
    pub rx_bytes: u64,
    /// Frames that took more than one receive buffer.
    pub rx_merged: u64,
    /// Frames received with a checksum for us to complete, or marked as checked.
    pub rx_checksum_offloaded: u64,
    /// Frames that the device delivered and the driver threw away: malformed.
    pub rx_dropped: u64,
    /// Frames sent. One that the device cuts counts once.
    pub tx_frames: u64,
    /// Their bytes, from the Ethernet header on.
    pub tx_bytes: u64,
    /// Frames sent for the device to cut.
    pub tx_segmented: u64,
    /// Times that the queue was full when a frame was to be sent.
    pub tx_full: u64,
    /// Notifications written to the device.
    pub kicks: u64,
    /// Interrupts taken for this pair's vectors.
    pub interrupts: u64,
}
