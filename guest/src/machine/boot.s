# From the PVH entry (32-bit, flat, paging off, ebx = start_info) or an application processor's
# start-up (16-bit) to long mode and into ring 3, where everything else happens: the tables below
# are ordinary memory to ring 3, so Rust fills in the IDT, the TSSes and the other processors' state.
#
# Every page is user and writable. 0..3 GiB is write-back, 3..4 GiB uncached (devices); the same
# uncached GiB is also the top one of the address space, so that the ring-0 stubs reach the local
# APIC with one instruction.

.section .note.pvh, "a", @note
    .balign 4
    .long 4, 4, 18                      # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long pvh_entry

.section .text.boot, "ax"
.code32
.global pvh_entry
pvh_entry:
    cld
    mov edi, ebx                        # start_info, to Rust's first argument
    xor esi, esi                        # CPU 0
    mov dword ptr [CPUS], offset CPUS   # its state; Rust makes the others'
    mov dword ptr [CPUS + CPU_RING0_STACK], offset RING0_STACKS + RING0_STACK_BYTES
    mov dword ptr [CPUS + CPU_TSS + 4], offset RING0_STACKS + RING0_STACK_BYTES
    mov dword ptr [CPUS + CPU_STACK], offset BOOT_STACK + STACK_BYTES - 8
    mov dword ptr [CPUS + CPU_ENTRY], offset start
    mov dword ptr [CPUS + CPU_FAULT_STACK], offset FAULT_STACKS + FAULT_STACK_BYTES - 8
    mov eax, offset CPUS + CPU_TSS
    mov word ptr [gdt_tss + 2], ax
    shr eax, 16
    mov byte ptr [gdt_tss + 4], al
    mov byte ptr [gdt_tss + 7], ah

to_long_mode:                           # esi = CPU number
    mov eax, 0x620                      # PAE, OSFXSR, OSXMMEXCPT: SSE on
    mov cr4, eax
    mov eax, offset pml4
    mov cr3, eax
    mov ecx, 0xC0000080                 # EFER
    rdmsr
    or eax, 0x100                       # LME
    wrmsr
    mov eax, 0x80000033                 # PG, NE, ET, MP, PE
    mov cr0, eax
    lgdt [gdt_pointer]
    .byte 0xEA                          # ljmp 8:long_mode
    .long long_mode
    .word 8

.code64
long_mode:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov fs, eax
    mov gs, eax
    mov ss, eax
    lidt [idt_pointer]
    mov eax, esi
    shl eax, 4
    add eax, 0x40                       # gdt_tss - gdt
    ltr ax
    mov ebx, esi
    shl ebx, CPU_SHIFT
    add ebx, offset CPUS
    mov ecx, 0xC0000101                 # GS_BASE: this CPU's state, in both rings
    mov eax, ebx
    xor edx, edx
    wrmsr
    mov rsp, [rbx + CPU_RING0_STACK]
    push 0x1B                           # ss
    push [rbx + CPU_STACK]              # rsp
    push 2                              # rflags: interrupts still off
    push 0x23                           # cs
    push [rbx + CPU_ENTRY]              # rip
    iretq

.code16                                 # copied to a page below 1 MiB, started there by SIPI
.balign 32
.global ap_start, ap_end
ap_start:
    cli
    mov ax, cs
    mov ds, ax
    lgdt ds:[32]                        # ap_gdt_pointer
    mov eax, 0x11                       # ET, PE
    mov cr0, eax
    .byte 0x66, 0xEA                    # ljmp 0x30:ap_protected
    .long ap_protected
    .word 0x30
.balign 32
ap_gdt_pointer:                         # 32 bytes from ap_start
    .word gdt_end - gdt - 1
    .long gdt
ap_end:

.code32
ap_protected:
    mov eax, 0x10
    mov ds, eax
    mov esi, [ap_cpu]
    jmp to_long_mode
.code64

.section .data
    .balign 16
.global gdt, gdt_tss
gdt:
    .quad 0
    .quad 0x00AF9B000000FFFF            # 0x08 ring-0 code, 64-bit
    .quad 0x00CF93000000FFFF            # 0x10 data
    .quad 0x00CFF3000000FFFF            # 0x18 ring-3 data
    .quad 0x00AFFB000000FFFF            # 0x20 ring-3 code, 64-bit
    .quad 0
    .quad 0x00CF9B000000FFFF            # 0x30 code, 32-bit, for start-up
    .quad 0
gdt_tss:                                # 0x40 + 16 per CPU
    .rept CPU_LIMIT
    .quad 0x0000890000000067, 0
    .endr
gdt_end:
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
idt_pointer:
    .word 4095
    .quad IDT
.global ap_cpu
ap_cpu:
    .long 0

    .balign 4096
.global pml4
pml4:
    .quad pdpt + 7
    .rept 510
    .quad 0
    .endr
    .quad pdpt_top + 7
pdpt:
    .quad page_directories + 0x0007, page_directories + 0x1007
    .quad page_directories + 0x2007, page_directories + 0x3007
    .rept 508
    .quad 0
    .endr
pdpt_top:
    .rept 511
    .quad 0
    .endr
    .quad page_directories + 0x3007
page_directories:                       # 2 MiB pages, user, writable
    .set page, 0
    .rept 1536
    .quad (page << 21) + 0x87
    .set page, page + 1
    .endr
    .rept 512
    .quad (page << 21) + 0x9F           # and uncached
    .set page, page + 1
    .endr
.text
