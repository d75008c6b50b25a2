"""Storage on the device that outlives a frame. Who owns which page is the scheduler's business."""
