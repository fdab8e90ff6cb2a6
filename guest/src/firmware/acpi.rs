//! Reads the ACPI tables that the guest needs: the CPUs (MADT) and the address of PCI's
//! configuration space (MCFG).
use super::PhysicalMemory;

/// Largest number of CPUs in the list.
pub const CPU_LIMIT: usize = 32;

/// Contents of the tables. They are kept without a heap, because the tables may lie where the heap
/// will be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    apic_ids: [u32; CPU_LIMIT],
    cpus: usize,
    /// Physical address of bus 0's enhanced configuration space; `None` without one.
    pub ecam: Option<u64>,
}

impl Tables {
    /// Returns the local APIC ids of the usable CPUs, in the tables' order.
    pub fn apic_ids(&self) -> &[u32] {
        &self.apic_ids[..self.cpus]
    }

    fn add_cpu(&mut self, apic_id: u64, flags: u64) {
        const ENABLED: u64 = 1;
        if flags & ENABLED != 0 && self.cpus < CPU_LIMIT {
            self.apic_ids[self.cpus] = apic_id as u32;
            self.cpus += 1;
        }
    }
}

/// Reads the tables from the root pointer at `rsdp`. With 0, the root pointer is searched for where
/// a PC's firmware puts it.
///
/// # Errors
/// A table is missing, lies outside memory, or is malformed.
pub fn read<M: PhysicalMemory>(memory: &M, rsdp: u64) -> Result<Tables, &'static str> {
    let rsdp = if rsdp == 0 {
        find_root(memory).ok_or("no ACPI root pointer")?
    } else {
        rsdp
    };
    if memory.bytes(rsdp, 8) != Some(b"RSD PTR ") {
        return Err("no ACPI root pointer where it was said to be");
    }
    let revision = memory.integer::<1>(rsdp + 15);
    let xsdt = memory
        .integer::<8>(rsdp + 24)
        .filter(|xsdt| revision >= Some(2) && *xsdt != 0);
    let rsdt = memory.integer::<4>(rsdp + 16);
    let (root, width) = match xsdt {
        Some(xsdt) => (xsdt, 8),
        None => (rsdt.ok_or("the ACPI root pointer is outside memory")?, 4),
    };
    let mut tables = Tables::default();
    for at in (36..table_length(memory, root)?).step_by(width) {
        let entry = root + at as u64;
        let address = if width == 8 {
            memory.integer::<8>(entry)
        } else {
            memory.integer::<4>(entry)
        };
        let address = address.ok_or("an ACPI table is outside memory")?;
        match memory.bytes(address, 4) {
            Some(b"APIC") => read_madt(memory, address, &mut tables)?,
            // One entry per segment and range of buses: the first is segment 0's.
            Some(b"MCFG") if table_length(memory, address)? >= 60 => {
                tables.ecam = memory.integer::<8>(address + 44);
            }
            _ => {}
        }
    }
    Ok(tables)
}

fn read_madt<M: PhysicalMemory>(
    memory: &M,
    madt: u64,
    tables: &mut Tables,
) -> Result<(), &'static str> {
    const LOCAL_APIC: u64 = 0;
    const LOCAL_X2APIC: u64 = 9;
    let end = madt + table_length(memory, madt)? as u64;
    let mut at = madt + 44;
    while at + 2 <= end {
        let kind = memory.integer::<1>(at).unwrap_or(0);
        let length = memory.integer::<1>(at + 1).unwrap_or(0);
        match (kind, length) {
            (_, 0..2) => return Err("the MADT has an entry without a length"),
            (LOCAL_APIC, 8..) => tables.add_cpu(
                memory.integer::<1>(at + 3).unwrap_or(0),
                memory.integer::<4>(at + 4).unwrap_or(0),
            ),
            (LOCAL_X2APIC, 16..) => tables.add_cpu(
                memory.integer::<4>(at + 4).unwrap_or(0),
                memory.integer::<4>(at + 8).unwrap_or(0),
            ),
            _ => {}
        }
        at += length;
    }
    Ok(())
}

fn table_length<M: PhysicalMemory>(memory: &M, table: u64) -> Result<usize, &'static str> {
    let length = memory
        .integer::<4>(table + 4)
        .ok_or("an ACPI table is outside memory")? as usize;
    memory
        .bytes(table, length)
        .map(<[u8]>::len)
        .ok_or("an ACPI table ends outside memory")
}

fn find_root<M: PhysicalMemory>(memory: &M) -> Option<u64> {
    (0xE_0000..0x10_0000)
        .step_by(16)
        .find(|at| memory.bytes(*at, 8) == Some(b"RSD PTR "))
}

#[cfg(test)]
#[path = "acpi_test.rs"]
mod tests;
