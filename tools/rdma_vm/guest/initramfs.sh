#!/bin/busybox sh
# init of the initramfs: mounts an overlay of the read-only image and a tmpfs, and the run's shared folder, whose boot.sh
# continues.
b=/bin/busybox
$b mkdir -p /proc /sys /dev /lower /upper /new
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do $b insmod "$module" || echo "rdma_vm: insmod $module failed"; done
$b mount -t ext4 -o ro /dev/vda /lower
$b mount -t tmpfs -o mode=755 upper /upper
$b mkdir /upper/files /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /new
for folder in dev proc sys; do $b mount --move /$folder /new/$folder; done
$b mkdir -p /new/rdma_vm
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 run /new/rdma_vm
exec $b switch_root /new /bin/sh /rdma_vm/boot.sh
