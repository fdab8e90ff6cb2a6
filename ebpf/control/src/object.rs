//! The BPF objects, embedded, so that one file is all there is to install.

/// What runs unless told otherwise.
static PLAIN: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/slipgate.o"));
/// The same programs, which also log what they decide.
static LOGGING: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/slipgate-log.o"));

/// The ELF object of one of the two builds.
pub fn bytes(logging: bool) -> &'static [u8] {
    if logging { LOGGING } else { PLAIN }
}
