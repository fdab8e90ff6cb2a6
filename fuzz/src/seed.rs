//! Writes the generated seeds into `corpus/`.
use std::{io, path::Path};

fn main() -> io::Result<()> {
    slipgate_fuzz::seeds::write(&Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus"))
}
