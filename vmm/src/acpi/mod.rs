//! The ACPI tables. They list the CPUs, interrupt controllers, PCI windows and legacy devices, and
//! say how the guest resets the machine or powers it off.
//!
//! The machine is of the hardware-reduced kind (ACPI 6.5, 4.1): no SCI, power-off by the sleep
//! registers, and of a PC's fixed hardware the PM timer alone. All tables lie in
//! [`layout::ACPI_TABLES`], the RSDP first:
//!
//! ```text
//! RSDP → XSDT → FADT → DSDT (AML)
//!             → MADT: local APICs, I/O APIC
//!             → MCFG: ECAM
//! ```
mod dsdt;
mod fadt;

use acpi_tables::{
    Aml,
    madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic},
    mcfg::MCFG,
    rsdp::Rsdp,
    xsdt::XSDT,
};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use crate::{
    GuestMemory,
    layout::{self, Window},
};

const OEM_ID: [u8; 6] = *b"SLIPGT";
const OEM_TABLE_ID: [u8; 8] = *b"SLIPGATE";
const OEM_REVISION: u32 = 1;

/// Properties of the machine that the tables depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcpiConfig {
    /// Number of CPUs. Their APIC ids count from 0.
    pub cpus: u8,
    /// Window for 64-bit BARs ([`layout::mmio64`]); `None` if there is none.
    pub mmio64: Option<Window>,
}

/// Reason why [`write()`] fails.
#[derive(Debug, Error)]
pub enum AcpiError {
    /// The number of CPUs is 0 or above [`layout::MAX_CPUS`].
    #[error("{0} CPUs: give 1 to {max}", max = layout::MAX_CPUS)]
    Cpus(u8),
    /// The tables do not fit [`layout::ACPI_TABLES`].
    #[error("the ACPI tables do not fit {max} bytes", max = layout::ACPI_TABLES.size)]
    Size,
    /// Writing to guest memory failed.
    #[error("writing ACPI tables to guest memory")]
    Write(#[from] vm_memory::GuestMemoryError),
}

/// Writes all tables to guest memory. Returns the address of the RSDP, which is always
/// [`layout::RSDP`].
///
/// # Errors
/// The number of CPUs is out of range, or the tables do not fit their window or the memory.
pub fn write(memory: &GuestMemory, config: &AcpiConfig) -> Result<GuestAddress, AcpiError> {
    if !(1..=layout::MAX_CPUS).contains(&config.cpus) {
        return Err(AcpiError::Cpus(config.cpus));
    }
    // The RSDP's address is fixed. Each table is written before the one that points to it.
    let mut tables = Writer {
        memory,
        next: layout::RSDP + Rsdp::len() as u64,
    };
    let dsdt = tables.put(&dsdt::table(config.mmio64))?;
    let fadt = tables.put(&fadt::table(dsdt))?;
    let madt = tables.put(&madt(config.cpus))?;
    let mcfg = tables.put(&mcfg())?;
    let mut root = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for table in [fadt, madt, mcfg] {
        root.add_entry(table);
    }
    let xsdt = tables.put(&root)?;
    let rsdp = bytes_of(&Rsdp::new(OEM_ID, xsdt));
    memory.write_slice(&rsdp, GuestAddress(layout::RSDP))?;
    Ok(GuestAddress(layout::RSDP))
}

struct Writer<'a> {
    memory: &'a GuestMemory,
    next: u64,
}

impl Writer<'_> {
    /// Writes a table at the next multiple of 16. Returns its address.
    fn put(&mut self, table: &dyn Aml) -> Result<u64, AcpiError> {
        let address = self.next.next_multiple_of(16);
        let bytes = bytes_of(table);
        self.next = address + bytes.len() as u64;
        if self.next > layout::ACPI_TABLES.end() {
            return Err(AcpiError::Size);
        }
        self.memory.write_slice(&bytes, GuestAddress(address))?;
        Ok(address)
    }
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn madt(cpus: u8) -> MADT {
    let local_apics = LocalInterruptController::Address(layout::LOCAL_APIC);
    let mut table = MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, local_apics);
    for cpu in 0..cpus {
        table.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    // The I/O APIC's id follows the CPUs' ids. Its inputs are GSI 0 to 23.
    table.add_structure(IoApic::new(cpus, layout::IO_APIC, 0));
    table
}

fn mcfg() -> MCFG {
    let mut table = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.add_ecam(layout::ECAM.start, 0, 0, layout::LAST_BUS);
    table
}

#[cfg(test)]
mod tests;
